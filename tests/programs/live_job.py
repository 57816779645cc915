"""What the parts of live_suite.py share: its options, the job's groups, data of each rank and case, and digests of results."""

import argparse
import hashlib
import math
import os
import re
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True, help="file that gets the lines, with .RANK appended")
parser.add_argument("--backend", choices=["gloo", "nccl", "mixed"], default="")
parser.add_argument("--eager", action="store_true", help="init_process_group(device_id=...)")
parser.add_argument("--skip", default="", help="leave out the case of this name")
parser.add_argument("--only", default="", help="run only the cases whose names begin so, and say where they fail")
options = parser.parse_args()

warnings.filterwarnings("ignore")  # many cases are of deprecated functions
backend = options.backend or ("nccl" if torch.cuda.is_available() else "gloo")
cuda = torch.cuda.is_available() and backend != "gloo"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
START = {"device_id": device if options.eager and cuda else None, "timeout": timedelta(seconds=60)}
dist.init_process_group(None if backend == "mixed" else backend, **START)
rank, world = dist.get_rank(), dist.get_world_size()
after, before, even = (rank + 1) % world, (rank - 1) % world, rank % 2 == 0
pair, _ = dist.new_subgroups_by_enumeration([[i, i + 1] for i in range(0, world - 1, 2)])
CASES = {}
current = {"salt": 0}  # of the case that runs: its data differ from other cases'


def case(function, name=""):
    """Registers a function without arguments; its result is what is compared."""
    CASES[name or function.__name__] = function
    return function


def case_if(condition):
    """Registers the function if the condition holds."""
    return case if condition else lambda function: function


def x(*shape, dtype=torch.float32):
    """Whole numbers from 1 to 5 (or truth values) that depend on the case and the rank."""
    numbers = (torch.arange(math.prod(shape)) * 7 + 3 * rank + current["salt"]) % 5 + 1
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype).view(shape).to(device)


def zeros(*counts):
    return [torch.zeros(count, device=device) for count in counts]


def hash_value(state, value):
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}{value.device.type}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.dtype == torch.bool:  # gloo adds their bytes: true may be any but 0
            flat = flat.view(torch.uint8) != 0
        state.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, list | tuple):
        state.update(f"{len(value)}".encode())
        for item in value:
            hash_value(state, item)
    else:
        state.update(repr(value).encode())


def digest(value):
    state = hashlib.sha256()
    hash_value(state, value)
    return state.hexdigest()[:16]


def outcome(function):
    try:
        return digest(function())
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if options.only:
            traceback.print_exc()
        text = re.sub(r"^\[rank.*?\.cpp:\d+\] ", "", text)  # torch's log line begins so
        return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '0x', text)}"


def done(result, work):
    """The result after the work; synchronous operations have none."""
    if work is not None:
        work.wait()
    return result


def written(op, tensors, *arguments, **options):
    """What an operation wrote to its first argument, for done()."""
    return tensors, op(tensors, *arguments, **options)


def wait_all(works):
    for work in works:
        work.wait()
    return len(works)


def batch(*messages, group=None):
    """Each message is (tensor, peer) to send or (tensor, peer, None) to receive; results are the received."""
    ops = [dist.P2POp(dist.irecv if len(each) == 3 else dist.isend, *each[:2], group) for each in messages]
    return wait_all(dist.batch_isend_irecv(ops)), [each[0] for each in messages if len(each) == 3]
