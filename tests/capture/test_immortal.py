"""Objects that live for ever: a forked process that uses them writes none of their pages. Python 3.12 and later."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """
import os, sys
from prism_tools.capture import immortal

def private():
    lines = open("/proc/self/smaps_rollup").readlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

things = [(float(k),) for k in range(200_000)]  # 48 bytes each, and 24
found = immortal.immortalize() if sys.argv[1] == "yes" else 0
here, there = os.pipe()
if os.fork() == 0:
    before = private()
    for thing in things:
        number = thing[0]
    os.write(there, b"%d" % (private() - before))
    os._exit(0)
print(found, os.read(here, 99).decode(), sys.getrefcount(things))
os.wait()
"""


def interpreters():
    """Pythons of 3.12 and later: this one, or those of the system."""
    if sys.version_info >= (3, 12):
        return [sys.executable]
    names = filter(None, map(shutil.which, ("python3.12", "python3.13", "python3.14")))
    found = [name for name in names if subprocess.run([name, "--version"], capture_output=True).returncode == 0]
    return found or [pytest.param("", marks=pytest.mark.skip(reason="no Python 3.12 or later here"))]


def measured(python, immortal):
    """(objects made immortal, KB that a forked process has for itself after it used 400,000 objects, one object's count)."""
    words = [python, "-c", MEASURE, immortal]
    out = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True).stdout
    return map(int, out.split())


@pytest.mark.parametrize("python", interpreters())
def test_pages_stay_shared(python):
    found, private, count = measured(python, "yes")
    assert found > 400_000 and count > 1_000_000
    assert private < 1_000
    found, private, count = measured(python, "no")
    assert found == 0 and count < 10
    assert private > 10_000  # 72 bytes × 200,000


def test_older_interpreters_stay_as_they_are(tmp_path):
    if sys.version_info >= (3, 12):
        pytest.skip("this Python knows immortal objects")
    found, private, count = measured(sys.executable, "yes")
    assert (found, count < 10, private > 10_000) == (0, True, True)
