"""Runs torch.distributed programs under real gloo, quickly: forks their ranks from one process that has imported torch.

Reads one JSON request a line, {"argv": [...], "world": W, "output": FILE}, and answers with the list of exit statuses.
The ranks get torchrun's environment and meet at a TCPStore; nothing of prism is between them and torch.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback

from prism_tools.capture.ranks import PRELOAD
from tests.tools import LIMIT, free_ports  # LIMIT: until a hanging run is given up


def become_rank(argv: list[str], rank: int, world: int, port: int, output: str) -> None:
    """Run the program in this process; does not return."""
    status = 1
    try:
        signal.alarm(LIMIT)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        # Kept: torch destroys groups holding the interpreter's lock, and joins their threads, which may wait for it.
        kept = runpy.run_path(argv[0], run_name="__main__")
        status = 0 if kept else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(argv: list[str], world: int, output: str) -> list[int]:
    """Exit statuses of the ranks (negative: the signal); all are ended once one has failed."""
    (port,) = free_ports("127.0.0.1", 1)
    pids: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if not pid:
            become_rank(argv, rank, world, port, output)
        pids[pid] = rank
    statuses = [0] * world
    while pids:
        pid, status = os.wait()
        statuses[pids.pop(pid)] = code = os.waitstatus_to_exitcode(status)
        if code:
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return statuses


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for name in PRELOAD:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["argv"], request["world"], request["output"])), flush=True)


if __name__ == "__main__":
    main()
