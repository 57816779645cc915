"""Where this process stands in its job: the one reader of what launchers tell it, the innermost launcher's word first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Per launcher: rank, world, local rank. An inner launcher leaves the outer one's variables in place (torchrun under srun,
# mpiexec inside salloc), so the order counts. What no launcher of tasks sets by itself tells them apart: hydra's
# local rank (srun --mpi=pmi2 sets PMI_RANK too, but knows the rest itself), and the step (a batch script has a
# SLURM_PROCID, and with salloc a SLURM_NTASKS, but is no task).
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


@dataclass(frozen=True)
class Placement:
    """``launcher``: a name of LAUNCHERS, or "" (started by hand: rank 0 of 1). ``node``: the node's name, which on a
    Slurm of several nodes a machine is not the machine's. ``attempt``: how often torchrun has started the job again."""

    launcher: str = ""
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: str = ""
    attempt: int = 0


def placement(environ: Mapping[str, str] = os.environ) -> Placement:
    """What the environment says; variables that are incomplete or no numbers are as if they were not there."""
    node = os.uname().nodename
    if "SLURM_STEP_ID" in environ:  # a batch script's value would be inherited through ssh
        node = environ.get("SLURMD_NODENAME") or node
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    for launcher, names in LAUNCHERS.items():
        values = [environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values):
            rank, world, local_rank = map(int, values)
            return Placement(launcher, rank, world, local_rank, node, int(attempt) if attempt.isdecimal() else 0)
    return Placement(node=node)
