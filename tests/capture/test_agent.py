"""A node's agent as the server meets it: a real one, started without Slurm."""

import json
import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from prism_tools.capture.link import Guest
from prism_tools.capture.node import Node
from prism_tools.errors import PrismError
from tests.tools import environment

SECRET = "5" * 64


@pytest.fixture
def agent():
    """Start an agent: its node, and its process."""
    started = []

    def start(cwd="/"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            begin = {
                "tool": "prism-replay", "first": 0,
                "host": "127.0.0.1", "port": listener.getsockname()[1], "secret": SECRET, "limit": 60,
                "environ": environment(), "cwd": cwd, "path": sys.path, "warm": False, "modules": [], "pretend": False,
            }  # fmt: skip
            words = [sys.executable, "-m", "prism_tools.capture.agent"]
            child = subprocess.Popen(
                words, env=environment(SLURM_STEP_ID="0", SLURMD_NODENAME="n7"), stdin=subprocess.PIPE
            )
            started.append(child)
            child.stdin.write(json.dumps(begin).encode() + b"\n")
            child.stdin.close()
            guest = Guest(listener.accept()[0])
        select.select([guest.sock], [], [], 60)
        return Node(*guest.heard(SECRET), guest.sock), child

    yield start
    for child in started:
        child.kill()
        child.wait()


def test_it_cannot_begin(agent):
    """The server is told why, though the agent is gone by the time it is asked."""
    node, child = agent(cwd="/nowhere")
    assert child.wait(60) == 1
    with pytest.raises(PrismError, match=r"^node n7: /nowhere: No such file or directory$"):
        node.answer(None)


def test_it_answers_until_it_is_killed(agent):
    node, child = agent()
    assert node.answer(None) is None
    assert node.ask(os.getpid) == child.pid
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(PrismError, match=r"^node n7: its agent is gone"):
        node.ask(os.getpid)
    with pytest.raises(PrismError, match=r"^node n7: its agent is gone$"):
        node.ask(os.getpid)


def test_it_ends_with_its_server(agent):
    node, child = agent()
    assert node.answer(None) is None
    node.close()
    assert child.wait(60) == 0


@pytest.mark.parametrize("told", ["", '{"tool": "prism-rep'])
def test_nobody_tells_it_how_to_begin(told):
    """The server has ended before it could: no traceback, and no status of which srun would tell."""
    words = [sys.executable, "-m", "prism_tools.capture.agent"]
    done = subprocess.run(words, env=environment(), input=told, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_is_turned_away(agent):
    """The server has been stopped while it came: it goes before it preloads anything, and says nothing."""
    node, child = agent()
    node.close()
    assert child.wait(60) == 0
