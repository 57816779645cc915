"""Starting tasks by MPI: the mpiexec of this Python's own environment (the mpich wheel), or the site's."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from prism_tools.errors import PrismError

SITE = "PRISM_MPIEXEC"  # the site's launcher with its options, such as "mpirun --oversubscribe"


def mpiexec(tasks: int) -> list[str]:
    """What to write before a command so that ``tasks`` copies of it run as one MPI job. PrismError: no such launcher.

    Never the first mpiexec on PATH: that of another MPI starts tasks that do not know of each other.
    """
    words = shlex.split(os.environ.get(SITE, ""))
    if not words:
        words = [str(Path(sys.prefix, "bin", "mpiexec"))]
    if shutil.which(words[0]) is None:
        raise PrismError(f"{words[0]}: no such launcher; pip install mpich, or name the site's in {SITE}")
    return [*words, "-n", str(tasks)]
