"""prism-record --live leaves the program alone: its waits, callbacks, children and errors are what they are without it."""

import subprocess
import sys

import pytest

from prism_tools.capture import shard
from prism_tools.errors import PrismError
from prism_tools.graph import file
from prism_tools.graph.schema import Kind, Op
from prism_tools.record.live import read_shards
from tests.capture.test_lanes import GOLDEN
from tests.record.test_live import ENVIRONMENT, TORCHRUN, live
from tests.tools import LIMIT

# Programs end their groups: without that, gloo alone aborts at the exit of one process in thirty.
HEAD = """
import datetime, os, subprocess, sys, time, torch, torch.distributed as dist
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
"""


def alone_and_live(folder, program, *options):
    """Sorted lines that the program prints without and with capture, and the graph's path."""
    (folder / "program.py").write_text(HEAD + program)
    command = [*TORCHRUN, "2", "program.py"]
    alone = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=folder, timeout=LIMIT)
    done, output = live(folder, command, *options)
    assert done.returncode == alone.returncode, done.stderr[-3000:]
    return sorted(alone.stdout.splitlines()), sorted(done.stdout.splitlines()), output


ORDERS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0, 1]) for _ in range(2)]
found = []
for k in (0, 1) if rank else (1, 0):  # a callback that waited would wait for ever
    tensor = torch.full((2,), float(k + 1))
    future = dist.all_reduce(tensor, group=groups[k], async_op=True).get_future()
    found.append((k, future.then(lambda f: [t.sum().item() for t in f.value()])))
say(rank, sorted((k, f.wait()) for k, f in found))
dist.barrier()
dist.destroy_process_group()
"""


def test_callbacks_do_not_wait(tmp_path):
    alone, traced, output = alone_and_live(tmp_path, ORDERS)
    assert traced == alone == ["0 [(0, [4.0]), (1, [8.0])]", "1 [(0, [4.0]), (1, [8.0])]"]
    assert file.read(output).world_size == 2


TIMEOUT = """
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
if rank == 0:
    work = dist.irecv(torch.ones(2), 1)
    for attempt in range(2):
        try:
            work.wait(datetime.timedelta(milliseconds=300))
            say("came", attempt)
        except RuntimeError as problem:
            say("Timed out" in str(problem) or type(problem).__name__, attempt)
    store.set("over", "1")
    os._exit(0)
store.wait(["over"])
os._exit(0)
"""


def test_a_wait_has_its_own_timeout_and_fails_again(tmp_path):
    (tmp_path / "program.py").write_text(HEAD + TIMEOUT)
    command = [*TORCHRUN, "2", "program.py"]
    alone = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=LIMIT)
    done, _ = live(tmp_path, command)  # no graph: the ranks leave by os._exit
    assert done.stdout == alone.stdout and done.stdout.count("0") == done.stdout.count("1") == 1
    assert "left" in done.stderr and "trace" in done.stderr


FORKED = """
import torch.multiprocessing as mp
def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    tensor = torch.ones(1) * (rank + 1)
    dist.all_reduce(tensor)
    say(rank, tensor.item())
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.start_processes(work, (os.getcwd(),), nprocs=2, start_method="fork")
"""


def test_ranks_that_are_forked_after_torch_is_there(tmp_path):
    (tmp_path / "program.py").write_text(HEAD + FORKED)
    done, output = live(tmp_path, [sys.executable, "program.py"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 3.0", "1 3.0"]
    graph = file.read(output)
    assert graph.launch.argv == ["program.py"] and graph.ranks.local_rank.tolist() == [0, 1]
    assert [graph.program_of(r).op[graph.program_of(r).kind == Kind.COMM].tolist() for r in (0, 1)] == [
        [Op.ALL_REDUCE]
    ] * 2


INNER = """
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:  # a job of its own, which is not this one's rank 0
    inner = ("import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1);"
             "d.barrier(); print('inner'); d.destroy_process_group()")
    subprocess.run([sys.executable, "-c", inner], check=True)
dist.barrier()
say("environment", [name for name in os.environ if name in ("PRISM_LIVE", "LD_PRELOAD")])
dist.destroy_process_group()
"""


def test_other_jobs_that_the_program_starts_are_not_its_ranks(tmp_path):
    alone, traced, output = alone_and_live(tmp_path, INNER)
    assert traced == alone == ["environment []", "environment []", "inner"]
    graph = file.read(output)
    assert [int((graph.program_of(rank).op == Op.BARRIER).sum()) for rank in (0, 1)] == [2, 2]


def test_the_last_attempt_of_a_restarted_job_counts(tmp_path):
    """torchrun starts all ranks again when one fails; those of the first attempt may have left shards, too."""
    for attempt, mode in ((0, "moe"), (1, "ddp")):
        for rank in (0, 1):
            trace = shard.read(GOLDEN / mode / f"{rank}.shard")
            shard.write({**trace, "attempt": attempt}, tmp_path / f"{attempt}.{rank}.shard")
    assert [trace["argv"][2] for trace in read_shards(str(tmp_path)).values()] == ["ddp", "ddp"]
    trace = shard.read(GOLDEN / "ddp" / "0.shard")
    with pytest.raises(FileExistsError):
        shard.write(trace, tmp_path / "1.0.shard")
    shard.write({**trace, "world_size": 3, "rank": 2, "attempt": 1}, tmp_path / "1.2.shard")
    with pytest.raises(PrismError, match="the command ran jobs of 2 and 3 ranks; trace one at a time"):
        read_shards(str(tmp_path))
    assert not list(tmp_path.glob("*.part"))


LOST = """
import glob, shutil
dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
for step in range(4):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if dist.get_rank() == 0 and step == 1:
        shutil.rmtree(glob.glob(".live.h5.live-*")[0], ignore_errors=True)
    dist.barrier()
    optimizer.step()
say(tensor.item())
dist.destroy_process_group()
"""


def test_what_goes_wrong_with_the_trace_does_not_reach_the_program(tmp_path):
    (tmp_path / "program.py").write_text(HEAD + LOST)
    done, output = live(tmp_path, [*TORCHRUN, "2", "program.py"], "--iterations", "2")
    assert done.stdout == "2.0\n2.0\n"
    assert "leaves no trace" in done.stderr and not output.exists()
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("prism-record: no rank left a trace")


WRONG = """
dist.init_process_group("gloo")
group = dist.group.WORLD
for call in (lambda: group.allreduce(None), lambda: group.allreduce([]), lambda: group.broadcast([torch.ones(1)], 7)):
    try:
        call()
    except Exception as problem:
        say(type(problem).__name__, str(problem).splitlines()[0][:60])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("program", [WRONG])
def test_wrong_calls_get_the_backends_own_errors(tmp_path, program):
    alone, traced, _ = alone_and_live(tmp_path, program)
    assert traced == alone and len(alone) == 6
