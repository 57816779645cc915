"""Starting tasks by Slurm, inside an allocation or for one of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prism_tools.launch.placement import placement


def srun(tasks: int, nodes: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What to write before a command so that ``tasks`` copies of it run on ``nodes`` nodes, block by block.

    Says everything itself: what is left out would come from SLURM_* of the surrounding job. --mpi=pmi2 makes one MPI job
    of them (the mpich wheel), and costs programs without MPI nothing. Components of another job, in which this one was
    submitted, are hidden from srun, which would look for them.
    """
    others = [name for name in environ if name.startswith("SLURM_") and "_HET_" in name]
    each = -(-tasks // nodes)
    shape = [f"--nodes={nodes}-{nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={each}"]
    words = ["srun", "--mpi=pmi2", *shape, "--distribution=block"]
    return words if _is_heterogeneous(environ) else _without(others, words)


def client(*words: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command line of sbatch, squeue or scancel, without what the environment would add to what is said here: filters
    of the queue, questions back, the end of the job to wait for; and, inside a job, that job, or the new one inherits it."""
    added = ("SQUEUE_", "SCANCEL_", *(["SLURM_"] if "SLURM_JOB_ID" in environ else []))
    names = [name for name in environ if name.startswith(added) or name == "SBATCH_WAIT"]
    return _without([name for name in names if name != "SLURM_CONF"], words)


def _without(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """A command line that runs ``words`` without the environment's ``names``."""
    return ["env", *(word for name in names for word in ("-u", name)), *words] if names else list(words)


@dataclass(frozen=True)
class Place:
    """``nodes`` nodes of the allocation for a step of one task each; ``words``: which, for srun; ``beside``: nodes that are
    left to whom the step serves: to us the first, and the others, if any, to an assistant for each further node."""

    nodes: int
    words: tuple[str, ...] = ()
    beside: int = 0


def all_of(nodes: int, most: int) -> Place | None:
    """``nodes`` nodes from the first on, but no more than ``most``; None: this machine is enough."""
    count = min(nodes, most)
    return Place(count) if count > 1 else None


def others(nodes: int | None, most: int, environ: Mapping[str, str] = os.environ) -> Place | None:
    """Of ``nodes`` nodes (None: of all that the job has) those behind the first, in a heterogeneous job those of the second
    component; of an even number the second half, behind an assistant's node for each. No more than ``most``; None: there
    is no other than this machine.

    Of a job whose tasks are tools that know nothing of each other, each has this machine only.
    """
    if nodes is None:
        nodes = 1 if placement(environ).world > 1 else allocated(environ)
    if _is_heterogeneous(environ):
        count = min(nodes - 1, most)
        return Place(count, ("--het-group=1",), beside=1) if count > 0 else None
    pairs = min(nodes // 2, most) if nodes % 2 == 0 else 1
    count = pairs if nodes % 2 == 0 else min(nodes - 1, most)
    return Place(count, (f"--relative={pairs}",), beside=pairs) if count > 0 else None


def _is_heterogeneous(environ: Mapping[str, str]) -> bool:
    """A job that was submitted inside a heterogeneous one has that one's variables too, but another number."""
    first = environ.get("SLURM_JOB_ID_HET_GROUP_0")
    return _number(environ, "SLURM_HET_SIZE") > 1 and first == environ.get("SLURM_JOB_ID")


def allocated(environ: Mapping[str, str] = os.environ) -> int:
    """Nodes of the job; of a heterogeneous one the first, and those of the second component."""
    if _is_heterogeneous(environ):
        return 1 + _number(environ, "SLURM_JOB_NUM_NODES_HET_GROUP_1")
    return _number(environ, "SLURM_JOB_NUM_NODES")


def _number(environ: Mapping[str, str], name: str) -> int:
    """What a variable says; 1 where it says nothing that is a number, as launch/placement.py takes them."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 1
