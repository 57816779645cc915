"""What prism-record says while it works: on a terminal, in a log with -v, and nothing otherwise."""

import os
import re

from tests.tools import LIMIT, program

LINE = r"iteration \d+{total}  ranks running \d blocked \d  switches [\d,]+ \([\d,]+/s\)  \d+:\d\d"
BEGIN, END = "2 ranks, 1 at a time; payloads: all", r"2 ranks recorded: \d+ switches in \d+\.\d s"
CALL = ("-n", 2, "-j", 1, "--iterations", 2, "-o", "run.h5")


def test_on_a_terminal(bench):
    ours, theirs = os.openpty()
    child = bench.start("record", *CALL, "--", program("ddp.py"), stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 65536):
            said += chunk
    except OSError:  # EIO: nobody has the other end any more
        pass
    os.close(ours)
    child.communicate(timeout=LIMIT)
    lines = [line.strip() for line in re.split(r"[\r\n]+|\x1b\[K", said.decode()) if line.strip()]
    assert child.returncode == 0 and lines[0] == f"prism-record: {BEGIN}", lines
    assert re.fullmatch(f"prism-record: {END}", lines[-1])
    moving = lines[1:-1]
    assert moving and all(re.fullmatch(LINE.format(total="/3"), line) for line in moving), moving


def test_in_a_log(bench):
    done = bench.run("record", "-v", *CALL, "--", program("ddp.py"))
    first, *moving, last = done.stderr.splitlines()
    assert first == f"prism-record: {BEGIN}" and re.fullmatch(f"prism-record: {END}", last)
    assert moving and all(re.fullmatch(f"prism-record: {LINE.format(total='/3')}", line) for line in moving)
    assert bench.run("record", "-qv", *CALL[:-1], "two.h5", "--", program("ddp.py")).stderr == ""
