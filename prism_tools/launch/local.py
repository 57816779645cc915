"""Starting ranks of a PyTorch program on this machine alone."""

from __future__ import annotations

import sys


def torchrun(tasks: int) -> list[str]:
    """What to write before a Python program so that ``tasks`` ranks of it run here, as one job."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tasks)]
