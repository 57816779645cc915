"""Programs that start their ranks with mp.spawn, and processes that are no ranks."""

import subprocess
import sys

from tests.tools import LIMIT, free_ports, program, said


def test_ranks_that_the_program_starts_itself(bench):
    """The same program as a plain command on real gloo, and recorded."""
    (port,) = free_ports("127.0.0.1", 1)
    words = [program("spawns.py"), "3", str(port)]
    alone = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, timeout=LIMIT)
    done = bench.run("record", "-n", 3, "-j", 2, "-o", "run.h5", "--", *words)
    assert done.lines("check") == said(alone.stdout, "check") == [f"check rank {rank} 20.0" for rank in range(3)]


NOT_RANKS = """
import torch.distributed as dist, torch.multiprocessing as mp
def prepare(k):
    print(f'check rank {k}\\n', end='', flush=True)
if __name__ == '__main__':
    mp.spawn(prepare, nprocs=2)
    dist.init_process_group('gloo')
    dist.barrier()
"""


def test_processes_that_are_no_ranks(bench):
    (bench.out / "prepares.py").write_text(NOT_RANKS)
    done = bench.run("record", "-n", 2, "-o", "run.h5", "--", "prepares.py", expect=1)
    assert "mp.spawn of 2 processes, as many as a node has ranks, was taken for the start of the ranks" in done.stderr
    done = bench.run("record", "-n", 2, "--nproc-per-node", 1, "-o", "run.h5", "--", "prepares.py")
    assert done.lines("check") == ["check rank 0", "check rank 0", "check rank 1", "check rank 1"]
