"""A program that can be stopped on the way, and a disk that is soon full."""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def halting(stages):
    """halting.py with four ranks, recorded and calibrated; its folder is where a `gate` stops it."""
    bare = stages.recorded(HERE / "halting.py", world=4)
    return {"bare": bare.path, "calibrated": stages.calibrated(stages.sliced(bare)).path, "folder": stages.folder}


@pytest.fixture
def gate(halting):
    """A named pipe that stops halting.py; yields a descriptor to read `ready` from."""
    path = halting["folder"] / "gate"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)
    path.unlink()


@pytest.fixture
def disk(tmp_path):
    """Makes a mounted file system of a given size ("8k"; "ro": one that cannot be written to); skips without root."""
    mounted = []

    def make(options):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
