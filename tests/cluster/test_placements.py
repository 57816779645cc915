"""What real launchers tell their tasks, as prism_tools.launch reads it."""

import os
import sys

import pytest

from prism_tools.launch.local import torchrun
from prism_tools.launch.mpi import mpiexec
from prism_tools.launch.slurm import srun

HERE = os.uname().nodename
SHOW = """
import sys
from prism_tools.launch.placement import placement
place = placement()
sys.stdout.write(f"{place.launcher or None} {place.rank}/{place.world} {place.local_rank} {place.node}\\n")
"""


@pytest.fixture
def shown(slurm, tmp_path):
    """Sorted lines of the tasks that a launcher starts."""
    (tmp_path / "show.py").write_text(SHOW)

    def run(*launcher, python=(sys.executable,)):
        slurm.rest()
        return sorted(slurm.run(*launcher, *python, "show.py", cwd=tmp_path).stdout.splitlines())

    return run


def test_nothing(shown):
    assert shown() == [f"None 0/1 0 {HERE}"]


@pytest.mark.parametrize("mpi", [True, False])
def test_srun(shown, mpi):
    words = [word for word in srun(7, 2) if mpi or word != "--mpi=pmi2"]
    assert shown(*words) == [f"srun {rank}/7 {rank % 4} n{rank // 4 + 1}" for rank in range(7)]


def test_a_job_around_srun_does_not_change_it(shown):
    salloc = ["salloc", "-Q", "-N3", "-n9", "--ntasks-per-node=3"]
    assert shown(*salloc, *srun(2, 2)) == ["srun 0/2 0 n1", "srun 1/2 0 n2"]
    assert shown(*salloc) == [f"None 0/1 0 {HERE}"]


def test_a_batch_script_is_no_task(slurm, tmp_path):
    (tmp_path / "show.py").write_text(f"#!{sys.executable}\n{SHOW}")
    slurm.run("sbatch", "--wait", "-N2", "-n4", "-o", "out", "show.py", cwd=tmp_path)
    assert (tmp_path / "out").read_text() == f"None 0/1 0 {HERE}\n"


def test_mpiexec(shown):
    assert shown(*mpiexec(3)) == [f"mpiexec {rank}/3 {rank} {HERE}" for rank in range(3)]
    salloc = ["salloc", "-Q", "-N2", "-n4", "--ntasks-per-node=2"]
    assert shown(*salloc, *mpiexec(4)) == [f"mpiexec {rank}/4 {rank % 2} n{rank // 2 + 1}" for rank in range(4)]


def test_the_mpi_of_the_site(shown, openmpi, monkeypatch):
    monkeypatch.setenv("PRISM_MPIEXEC", openmpi)
    assert shown(*mpiexec(3)) == [f"mpirun {rank}/3 {rank} {HERE}" for rank in range(3)]


def test_torchrun_in_a_step(shown):
    assert shown(*srun(1, 1), *torchrun(2), python=()) == ["torchrun 0/2 0 n1", "torchrun 1/2 1 n1"]
