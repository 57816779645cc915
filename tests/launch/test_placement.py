"""Placements: what each launcher tells its tasks, outer launchers' left-overs included (values as real ones set them)."""

import os

import pytest

from prism_tools.errors import PrismError
from prism_tools.launch.local import torchrun
from prism_tools.launch.mpi import mpiexec
from prism_tools.launch.placement import Placement, placement
from prism_tools.launch.slurm import srun

HERE = os.uname().nodename
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
STEP |= {"SLURM_NTASKS": "4", "SLURMD_NODENAME": "n2"}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "PMI_HOSTNAME": "n2"}
OPEN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TORCHRUN = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, Placement(node=HERE)),
        (BATCH, Placement(node=HERE)),
        (STEP, Placement("srun", 3, 4, 1, "n2")),
        (STEP | PMI2, Placement("srun", 3, 4, 1, "n2")),
        (BATCH | STEP | HYDRA, Placement("mpiexec", 5, 8, 1, "n2")),
        (HYDRA, Placement("mpiexec", 5, 8, 1, HERE)),
        (OPEN, Placement("mpirun", 1, 2, 0, HERE)),
        (STEP | TORCHRUN, Placement("torchrun", 6, 8, 2, "n2", 1)),
        ({"RANK": "1", "WORLD_SIZE": "x", "LOCAL_RANK": "0"}, Placement(node=HERE)),
    ],
)
def test_the_innermost_launcher_counts(environ, expected):
    assert placement(environ) == expected


def test_launchers_are_tokens(monkeypatch):
    monkeypatch.setenv("PRISM_MPIEXEC", "env mpirun --oversubscribe --mca 'btl tcp,self'")
    assert mpiexec(3) == ["env", "mpirun", "--oversubscribe", "--mca", "btl tcp,self", "-n", "3"]
    shape = ["--nodes=2-2", "--ntasks=7", "--ntasks-per-node=4", "--distribution=block"]
    assert srun(7, 2) == ["srun", "--mpi=pmi2", *shape]
    assert torchrun(4)[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def test_no_mpiexec(monkeypatch):
    monkeypatch.setenv("PRISM_MPIEXEC", "/no/mpirun -x")
    with pytest.raises(
        PrismError, match="^/no/mpirun: no such launcher; pip install mpich, or name the site's in PRISM_"
    ):
        mpiexec(2)
