"""Rank processes: forked from one process that has imported torch once, in their own process groups, gone with their parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import multiprocessing.process
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from prism_tools.capture import immortal, imports
from prism_tools.tensors.rules import Rules

# What programs of any kind import sooner or later; importing them here once instead of in every rank.
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim",
)
PR_SET_PDEATHSIG = 1
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
OURS, SILENT = -1, -2  # of Spec.output


@dataclass
class Spec:
    """What a rank process runs. ``output``: descriptor that becomes its stdout, OURS, or SILENT; ``body``: run this
    function instead of the program ``argv``; ``device``: of Launch; ``issue_cost``, ``eager_sends``: see capture/session.py;
    ``rules``, ``lenient``: the rank runs without its peers (capture/ruled.py)."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    world_size: int
    rank: int
    local_rank: int
    node: int
    nproc_per_node: int
    entropy: int
    sandbox: frozenset[int]
    stop_after: int
    announce: bool
    output: int = OURS
    body: Callable[[], None] | None = None
    issue_cost: dict[int, int] | None = None
    eager_sends: bool = False
    device: str = "cpu"
    rules: Rules | None = None
    lenient: bool = False


def threads_of_a_rank() -> None:
    """One computing thread a process, as torchrun sets it; must run before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def limits() -> None:
    """One computing thread, and all the descriptors there can be: a socket or two for each rank, payloads in flight."""
    threads_of_a_rank()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import torch

    torch.set_num_threads(1)


def preload(warm: bool = False, modules: Sequence[str] = (), pretend: bool = False) -> None:
    """Import torch and what programs need of it, and make the memory shareable with forked ranks. ``warm``: also let torch
    set itself up here (capture/warm.py), and import ``modules``, with CUDA devices if they ``pretend`` them: for many ranks,
    and not where one is measured, whose memory and first operations are to be those of a process of its own."""
    limits()
    for name in PRELOAD:
        importlib.import_module(name)
    pretend_cuda = importlib.import_module("prism_tools.capture.pretend_cuda")  # and all of capture
    if warm:
        importlib.import_module("prism_tools.capture.warm").warm_up()
        if pretend:
            pretend_cuda.patch()
        with pretend_cuda.CudaOnCpu() if pretend else contextlib.nullcontext():
            imports.load(modules)
    gc.collect()
    if warm:
        immortal.immortalize()
    gc.freeze()


def fork(spec: Spec, close: list[socket.socket]) -> tuple[int, socket.socket]:
    """Start one rank: (pid, the server's end of its socket). ``close``: sockets of ours that the rank must not hold."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # what hooks of a fork raise is printed, and lost
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        theirs.close()
        return pid, ours
    try:
        ours.close()
        for sock in close:
            sock.close()
        _become_rank(spec, theirs, parent, before)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(70)  # not reached: a rank ends inside _become_rank


def _become_rank(spec: Spec, sock: socket.socket, parent: int, unblocked: set[int | signal.Signals]) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the tool, which ends its ranks
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in STOPS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    gc.enable()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if spec.output != OURS:
        os.dup2(null if spec.output == SILENT else spec.output, 1)
    os.close(null)
    multiprocessing.process.ORIGINAL_DIR = spec.cwd  # type: ignore[attr-defined] # where spawned children start
    os.environ.update(spec.env)
    os.environ.update(rank_environment(spec))

    from prism_tools.capture.client import Client
    from prism_tools.capture.session import start

    client = Client(sock, spec.announce)
    client.wait_for_go()
    session = start(client, spec)
    session.finish(run_program(spec))


def rank_environment(spec: Spec) -> dict[str, str]:
    """The variables that torchrun sets."""
    nodes = (spec.world_size + spec.nproc_per_node - 1) // spec.nproc_per_node
    values = {
        "RANK": spec.rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": spec.local_rank,
        "LOCAL_WORLD_SIZE": min(spec.nproc_per_node, spec.world_size),
        "GROUP_RANK": spec.node,
        "NODE_RANK": spec.node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": spec.rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "prism",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in values.items()}


def run_program(spec: Spec) -> int:
    """Run the user's program as ``python argv…`` would, and its exit handlers; returns its exit status."""
    status = 0
    argv, cwd = spec.argv, spec.cwd
    try:
        os.chdir(cwd)
        if spec.body is not None:
            spec.body()
        elif argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path.insert(0, cwd)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        status = exit_status(error)
    except BaseException as error:
        traceback.print_exception(type(error), error, user_frames(error.__traceback__))
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # The interpreter would flush what is still open. What the tool had open is frozen, so it is not among these objects.
    for thing in gc.get_objects():
        # By its type: asking a weak proxy whose object is gone for its class raises.
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter)) and not thing.closed and thing.writable():
            with contextlib.suppress(OSError):
                thing.flush()
    return status


def exit_status(error: SystemExit) -> int:
    """As the interpreter does: a number, nothing, or a message on stderr and 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that started the program."""
    own = (os.path.dirname(__file__), "<frozen runpy>", runpy.__file__)
    rest: Any = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(own):
        rest = rest.tb_next
    return rest or frames
