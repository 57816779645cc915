"""The Slurm that all tests of this folder share."""

import os

import pytest

from tests.cluster.mini import MiniSlurm, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Four idle nodes of four CPUs. Where there can be no Slurm: skipped; under CI: failed."""
    if reason := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Slurm: {reason}")
    with MiniSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
