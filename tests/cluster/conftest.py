"""The Slurm that all tests of this folder share."""

import os
import shutil

import pytest

from tests.apt import install
from tests.cluster.mini import MiniSlurm, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Started once. Where there can be no Slurm: skipped; under CI: failed."""
    if reason := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Slurm: {reason}")
    with MiniSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def openmpi():
    """The launcher of a site whose MPI is Open MPI: another than that of this Python's environment."""
    launcher = "mpirun.openmpi"
    if reason := install(lambda: [] if shutil.which(launcher) else [launcher], "openmpi-bin"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return f"{launcher} --allow-run-as-root --oversubscribe"


@pytest.fixture
def slurm(cluster):
    """Four idle nodes of four CPUs, n1 to n4."""
    cluster.rest()
    yield cluster
    cluster.run("scancel", "-u", "root")
