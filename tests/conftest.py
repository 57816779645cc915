"""What tests of several stages share: real gloo as the reference, files of every stage, and a watched workplace."""

import pytest

from tests.tools import SUMS, Bench, RealGloo, Stages


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Programs under real gloo."""
    gloo = RealGloo(tmp_path_factory.mktemp("real"))
    yield gloo
    gloo.close()


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """Recorded, sliced, calibrated and replayed graphs."""
    return Stages(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="session")
def sums(stages):
    """faults/sums.py with four ranks at each stage: {"bare": …, "sliced": …, "calibrated": …}."""
    bare = stages.recorded(SUMS, world=4)
    sliced = stages.sliced(bare)
    return {"bare": bare.path, "sliced": sliced.path, "calibrated": stages.calibrated(sliced).path}


@pytest.fixture
def bench(tmp_path):
    """A workplace that must be clean at the end: no process, no temporary file, nothing new in /dev/shm."""
    place = Bench(tmp_path)
    yield place
    try:
        place.check_clean()
    finally:
        place.close()
