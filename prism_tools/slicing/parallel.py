"""Several slices at once on one machine: how many it holds, and a process for each."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prism_tools.capture.ranks import PR_SET_PDEATHSIG
from prism_tools.errors import PrismError

Task = TypeVar("Task")
Result = TypeVar("Result")


def check_cores(count: int, size: int) -> None:
    """PrismError unless there is a core for every rank of ``count`` slices of ``size`` ranks at once (``count`` > 1)."""
    cores = len(os.sched_getaffinity(0))
    if count > 1 and count * size > cores:
        needed = f"{count} slices of {size} ranks at once need {count * size} cores, there are {cores}"
        raise PrismError(f"--parallel {count}: {needed}; at most --parallel {max(cores // size, 1)}", status=2)


def fitting(count: int, taken: int, progress: Any) -> int:
    """How many slices at once, at most ``count``, the memory holds if each takes ``taken`` bytes as the first did."""
    held = max(available_memory() // max(taken, 1), 1)
    if held < count:
        progress.warn(f"the free memory holds {held} slices at once ({taken / 1e9:.1f} GB each), not {count}")
    return min(held, count)


def available_memory() -> int:
    """Bytes that new processes can have: of the machine, or of what this process's control group may still take."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        places = dict(
            line.split("::", 1) for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line
        )
        folder = Path("/sys/fs/cgroup") / places["0"].lstrip("/")
        most, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return min(free, most - used + int(stat["inactive_file"]))  # which is dropped when others need it
    except (OSError, KeyError, ValueError):  # no limit ("max"), or none that can be seen
        return free


def in_processes(tasks: Sequence[Task], count: int, work: Callable[[Task], Result]) -> Iterator[tuple[Task, Result]]:
    """``work`` of each task in a forked process of its own, ``count`` at once; yields (task, result) as they come.

    PrismError: that of the first work that fails. No process is left when this returns, raises or is closed.
    """
    waiting = list(tasks)
    running: dict[int, tuple[int, Task, list[bytes]]] = {}  # pipe → process, task, what it has sent
    selector = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < count:
                task = waiting.pop(0)
                pipe, pid = _start(work, task)
                running[pipe] = pid, task, []
                selector.register(pipe, selectors.EVENT_READ)
            for key, _ in selector.select():
                pid, task, sent = running[key.fd]
                if data := os.read(key.fd, 1 << 20):
                    sent.append(data)
                    continue
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                del running[key.fd]
                yield task, _result(b"".join(sent), os.waitstatus_to_exitcode(status))
    finally:
        for pid, *_ in running.values():
            os.kill(pid, signal.SIGTERM)  # it ends its ranks, and what they have started
        for pipe, (pid, *_) in running.items():
            os.waitpid(pid, 0)
            os.close(pipe)
        selector.close()


def _start(work: Callable[[Task], Any], task: Task) -> tuple[int, int]:
    """Fork: (the pipe that the result will come through, process)."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()  # before the fork: once for all
    parent = os.getpid()
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # what raises in the child must not unwind our stack there
    pid = os.fork()
    if not pid:
        os.close(ours)
        _work(work, task, theirs, parent, stops)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    os.close(theirs)
    return ours, pid


def _work(work: Callable[[Task], Any], task: Task, pipe: int, parent: int, stops: set[signal.Signals]) -> NoReturn:
    """The child: sends ("done", result) or ("failed", message, status, detail), and ends."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tool's, which ends us
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        try:
            answer: tuple = ("done", work(task))
        except PrismError as error:
            answer = ("failed", str(error), error.status, error.detail)
        except OSError as error:  # such as no more processes: said as the tool says its own
            answer = ("failed", f"{error.filename or 'a slice'}: {error.strerror or error}", 1, "")
        with open(pipe, "wb") as stream:
            pickle.dump(answer, stream)
        status = 0
    except SystemExit as end:  # by a signal
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _result(sent: bytes, status: int) -> Any:
    if status or not sent:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        raise PrismError(f"the process of a slice {how}; with less --parallel there is more memory for each")
    answer = pickle.loads(sent)
    if answer[0] == "done":
        return answer[1]
    raise PrismError(*answer[1:])
