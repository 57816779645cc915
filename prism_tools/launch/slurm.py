"""Starting tasks by Slurm, inside an allocation or for one of their own."""

from __future__ import annotations


def srun(tasks: int, nodes: int) -> list[str]:
    """What to write before a command so that ``tasks`` copies of it run on ``nodes`` nodes, block by block.

    Says everything itself: what is left out would come from SLURM_* of the surrounding job. --mpi=pmi2 makes one MPI job
    of them (the mpich wheel), and costs programs without MPI nothing.
    """
    each = -(-tasks // nodes)
    shape = [f"--nodes={nodes}-{nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={each}"]
    return ["srun", "--mpi=pmi2", *shape, "--distribution=block"]
