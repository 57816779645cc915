"""The Slurm that all tests of this folder share."""

import os

import pytest

from tests.cluster.mini import MiniSlurm, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Started once. Where there can be no Slurm: skipped; under CI: failed."""
    if reason := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Slurm: {reason}")
    with MiniSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster):
    """Four idle nodes of four CPUs, n1 to n4."""
    cluster.rest()
    yield cluster
    cluster.run("scancel", "-u", "root")
