"""Forking ranks: a signal that comes meanwhile is not lost."""

import subprocess
import sys

from tests.tools import LIMIT, environment

STOPPED = """
import os, signal, sys
from prism_tools.capture import ranks

def stop(*_):
    raise SystemExit(3)

signal.signal(signal.SIGTERM, stop)
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
ranks.fork(ranks.Spec([], "/", {}, 1, 0, 0, 0, 1, 0, frozenset(), -1, False), [])
sys.exit("the signal was lost")
"""


def test_a_signal_that_comes_during_a_fork_stops_the_tool():
    """Python prints and forgets what hooks of a fork raise, of which logging has some."""
    words = [sys.executable, "-c", STOPPED]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (3, "")
