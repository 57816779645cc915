"""Running make as a user or an administrator does, and unpacking Debian's packages."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.tools import LIMIT, ROOT, environment


def bare_environment(**more):
    """As a user has it who knows nothing of the sources."""
    kept = environment()
    for name in ("PYTHONPATH", "MANPATH", "MODULEPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PRISM"):
        kept.pop(name, None)
    return kept | more


def make(*arguments, cwd=ROOT, expect=0, **more):
    """Run make with this interpreter; pip asks no index. Returns what it wrote, both streams together."""
    quiet = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # pip takes 0 for: no isolation
    if int(version("setuptools").split(".")[0]) < 77:  # pyproject.toml wants it: pip fetches one to build with
        quiet = {}
    done = subprocess.run(
        ["make", *map(str, arguments), f"PYTHON={sys.executable}"],
        cwd=cwd,
        env=bare_environment(**quiet | more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def fetch(root: Path, *packages):
    """Unpack Debian's ``packages``, and of what they need that which is missing, in ``root``."""
    cache = root / "cache"
    (cache / "partial").mkdir(parents=True)
    get = ["apt-get", "-qq", "-o", f"Dir::Cache::archives={cache}", "-o", "Debug::NoLocking=1"]
    for package in packages:
        wanted = [*get, "install", "--download-only", "--reinstall", "--no-install-recommends", "-y", package]
        if subprocess.run(wanted, capture_output=True, timeout=120).returncode:
            subprocess.run(["apt-get", "-qq", "update"], capture_output=True, timeout=120)  # images come without lists
            subprocess.run(wanted, check=True, capture_output=True, timeout=120)
    for archive in cache.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, root], check=True, timeout=60)
