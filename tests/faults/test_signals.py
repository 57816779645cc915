"""Ctrl-C, SIGTERM and SIGKILL while a tool works: its exit status, and that nothing is left behind."""

import os
import select
import signal
import subprocess

import pytest

from tests.tools import LIMIT, marked, program, until

# What a shell reports for a tool that was told to stop; Ctrl-C reaches the whole process group, as from a terminal.
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def stop(child, number):
    if number == signal.SIGINT:
        os.killpg(child.pid, number)
    else:
        os.kill(child.pid, number)


def ready(gate, child):
    """Wait until a rank says `ready` through the gate."""
    assert select.select([gate], [], [], LIMIT)[0], child.poll()
    assert os.read(gate, 100) == b"ready\n"


@pytest.mark.parametrize("number", STATUS)
def test_record(number, bench):
    child = bench.start("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program("forever.py"))
    assert child.stdout.readline() == "ready\n"
    assert len(marked(bench.mark)) == 5
    stop(child, number)
    done = bench.finish(child)
    assert (done.status, done.stderr) == (STATUS[number], "")
    assert bench.files() == set()


@pytest.mark.parametrize("number", STATUS)
def test_slice(number, bench, halting, gate):
    child = bench.start("slice", halting["bare"], "-s", 2, "-o", "sliced.h5")
    ready(gate, child)
    stop(child, number)
    done = bench.finish(child)
    assert (done.status, done.stdout, done.stderr) == (STATUS[number], "", "")
    assert bench.files() == set()


@pytest.mark.parametrize("number", STATUS)
def test_replay(number, bench, halting, gate):
    child = bench.start("replay", "-r", "0-1", halting["calibrated"], "-o", "replayed.h5")
    ready(gate, child)
    stop(child, number)
    done = bench.finish(child)
    assert (done.status, done.stdout, done.stderr) == (STATUS[number], "", "")
    assert bench.files() == set()


@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("call", [("calibrate",), ("inspect", "summary")])
def test_while_it_reads_a_pipe(call, number, bench):
    child = bench.start(*call, stdin=subprocess.PIPE, text=False)
    size = 1 << 17
    assert os.write(child.stdin.fileno(), b"\x89HDF\r\n\x1a\n".ljust(size)) == size  # more than a pipe holds: it reads
    stop(child, number)
    assert (child.wait(LIMIT), child.stdout.read(), child.stderr.read()) == (STATUS[number], b"", b"")


def test_a_pipeline_is_interrupted_as_a_whole(bench, halting, gate):
    """Every tool of it ends, with nothing but the first one's silence to report."""
    first = bench.start("slice", halting["bare"], "-s", 2)
    second = bench.start("calibrate", stdin=first.stdout, group=first.pid)
    ready(gate, first)
    os.killpg(first.pid, signal.SIGINT)
    assert (first.wait(LIMIT), second.wait(LIMIT)) == (130, 130)
    assert (first.stderr.read(), second.stderr.read(), second.stdout.read()) == ("", "", "")


def test_a_killed_record_leaves_no_rank(bench):
    child = bench.start("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program("forever.py"))
    assert child.stdout.readline() == "ready\n"
    child.kill()
    until(lambda: not marked(bench.mark))
    assert child.wait() == -signal.SIGKILL
    (left,) = bench.files()  # nobody could take it away
    assert left.startswith(".run.payload.prism-")
    bench.run("record", "-n", 4, "-j", 2, "--iterations", 1, "-o", "run.h5", "--", program("forever.py"))
    assert bench.files() == {"run.h5", "run.payload"}
    assert bench.run("inspect", "payloads", "--verify", "run.h5").stderr == ""


def test_a_killed_replay_leaves_no_rank(bench, halting, gate):
    child = bench.start("replay", "-r", "0-1", halting["calibrated"], "-o", "replayed.h5")
    ready(gate, child)
    assert len(marked(bench.mark)) == 3
    child.kill()
    until(lambda: not marked(bench.mark))
    assert bench.files() == set()
