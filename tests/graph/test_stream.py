"""Pipes, terminals, full disks and sudden death: real processes, real file systems."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.file import read, write
from prism_tools.graph.stream import check_place
from tests.graph.builder import add_results, differences, train4

HEAD = """
import os, signal, sys
from prism_tools.errors import PrismError
from prism_tools.graph import stream
from prism_tools.graph.file import read, write
from tests.graph.builder import add_results, train4
def main():
    {body}
try:
    main()
except PrismError as error:
    sys.exit(str(error))
"""
MAKE = "graph = train4(); add_results(graph); write(graph, '-')"
COPY = "write(read('-'), '-')"


def python(body: str, **options) -> subprocess.Popen:
    """A child that runs ``body`` and, as the tools do, prints a PrismError as one line and exits 1."""
    code = HEAD.replace("{body}", body.replace("\n", "\n    "))
    return subprocess.Popen([sys.executable, "-c", code], **options)


@pytest.fixture
def full():
    graph = train4()
    add_results(graph)
    return graph


def test_pipes_carry_the_same_bytes_as_files(full, tmp_path):
    write(full, tmp_path / "file.h5")
    maker = python(MAKE, stdout=subprocess.PIPE)
    with open(tmp_path / "pipe.h5", "wb") as out:
        copier = python(COPY, stdin=maker.stdout, stdout=out)
        maker.stdout.close()
        assert (copier.wait(), maker.wait()) == (0, 0)
    assert (tmp_path / "pipe.h5").read_bytes() == (tmp_path / "file.h5").read_bytes()


def test_redirected_file_is_read_in_place(full, tmp_path):
    write(full, tmp_path / "g.h5")
    with open(tmp_path / "g.h5", "rb") as source:
        child = python("stream._spooled = None\n" + COPY, stdin=source, stdout=subprocess.PIPE)
        assert child.communicate()[0] == (tmp_path / "g.h5").read_bytes()


def test_large_pipes_are_spooled_to_a_folder(full, tmp_path):
    write(full, tmp_path / "g.h5")
    whole = (tmp_path / "g.h5").read_bytes()
    (tmp_path / "spool").mkdir()
    body = "stream.IN_MEMORY = 1000\n" + COPY
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = python(body, env=os.environ | {"TMPDIR": str(tmp_path / "spool")}, **pipes)
    assert child.communicate(whole) == (whole, b"")
    assert os.listdir(tmp_path / "spool") == []
    child = python(body, env=os.environ | {"SLURM_TMPDIR": str(tmp_path / "none")}, **pipes)
    out, err = child.communicate(whole)
    assert (child.returncode, out) == (1, b"")
    problem = f"standard input: cannot be spooled to {tmp_path}/none: No such file or directory; set TMPDIR"
    assert err.decode().splitlines() == [problem]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "standard input: is empty"),
        (b"x" * 100, "is not an HDF5"),
        (b"\x89HDF\r\n\x1a\n", "standard input: is damaged"),
    ],
)
def test_bad_pipes_are_refused(data, problem):
    child = python(COPY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = child.communicate(data)
    assert (child.returncode, out, err.decode().count("\n")) == (1, b"", 1)
    assert problem in err.decode()


def test_truncated_pipe_is_refused(full, tmp_path):
    write(full, tmp_path / "g.h5")
    whole = (tmp_path / "g.h5").read_bytes()
    child = python(COPY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = child.communicate(whole[:-1000])
    assert out == b"" and err.decode() == "standard input: is truncated; copy or make it again\n"


def test_terminals_are_refused():
    leader, follower = pty.openpty()
    try:
        child = python(MAKE, stdout=follower, stderr=subprocess.PIPE)
        line = "standard output: is a terminal; give -o FILE, or pipe it into the next tool\n"
        assert child.communicate()[1].decode() == line
        child = python(COPY, stdin=follower, stderr=subprocess.PIPE)
        assert child.communicate()[1].decode() == "standard input: is a terminal; give a file or a pipe\n"
    finally:
        os.close(leader)
        os.close(follower)


def test_named_pipes_work_both_ways(full, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = python(f"graph = train4(); add_results(graph); write(graph, {str(fifo)!r})")
    graph = read(fifo)
    assert child.wait() == 0 and differences(graph, full) == []
    assert os.listdir(tmp_path) == ["fifo"]


def test_devices_are_written_to_and_not_replaced(full, tmp_path):
    before = os.stat("/dev/null")
    write(full, "/dev/null")
    assert os.stat("/dev/null").st_rdev == before.st_rdev
    with pytest.raises(PrismError, match="^/dev/full: cannot be written: No space left on device; free some"):
        write(full, "/dev/full")
    with open("/dev/full", "wb") as device:
        child = python(MAKE, stdout=device, stderr=subprocess.PIPE)
        assert child.communicate()[1].decode().startswith("standard output: cannot be written: No space left")


def test_reader_that_leaves_early_is_a_broken_pipe_and_no_error_of_ours():
    body = MAKE.replace("write", "sys.stdin.read(); write") + "\nprint('not reached', file=sys.stderr)"
    child = python(body, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    child.stdin.close()
    assert child.stderr.read().endswith(b"BrokenPipeError: [Errno 32] Broken pipe\n")
    child.stderr.close()
    child.wait()


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_leaves_the_old_file(full, tiny_disk):
    target = tiny_disk / "g.h5"
    target.write_bytes(b"old")
    for _ in range(2):  # the space is free again afterwards
        with pytest.raises(PrismError, match="g.h5: cannot be written: No space left on device; free some") as caught:
            write(full, target)
        assert "\n" not in str(caught.value)
        assert target.read_bytes() == b"old" and os.listdir(tiny_disk) == ["g.h5"]


def test_places_that_cannot_be_written_are_refused(full, tmp_path):
    (tmp_path / "g.h5").mkdir()
    places = {
        tmp_path / "g.h5": "Is a directory; name a file in it",
        tmp_path / "none" / "g.h5": "No such file or directory; make its folder first",
        "/proc/g.h5": "; make its folder first",
        "/sys/g.h5": "; choose a folder you can write to",
    }
    for place, problem in places.items():
        with pytest.raises(PrismError) as caught:
            write(full, place)
        assert str(caught.value).startswith(f"{place}: cannot be written: ") and str(caught.value).endswith(problem)
        with pytest.raises(PrismError) as early:
            check_place(str(place))
        assert str(early.value) == str(caught.value)
    for place in (tmp_path / "new.h5", "-", "/dev/null"):
        check_place(str(place))
    assert os.listdir(tmp_path) == ["g.h5"]


# The child says "built" when its temporary file is whole but not yet in place, and then waits to be killed.
HALT = """
def halt(fd):
    print("built", flush=True)
    signal.pause()
os.fsync = halt
write(train4(), {target!r})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_death_before_the_rename_leaves_the_old_file(tmp_path, number):
    target = tmp_path / "g.h5"
    target.write_bytes(b"old")
    child = python(HALT.format(target=str(target)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"built\n"
    assert len(os.listdir(tmp_path)) == 2
    child.send_signal(number)
    child.communicate()
    assert target.read_bytes() == b"old"
    left = [name for name in os.listdir(tmp_path) if name != "g.h5"]
    if number == signal.SIGINT:
        assert left == []
    else:
        assert len(left) == 1 and left[0].startswith(".g.h5.prism-") and left[0].endswith(".tmp")


def test_death_at_any_moment_leaves_a_whole_file(full, tmp_path):
    target = tmp_path / "g.h5"
    body = (
        f"graph = train4(); add_results(graph)\nwhile True:\n    write(graph, {str(target)!r})\n    print(flush=True)"
    )
    for rounds in (1, 2, 3):
        child = python(body, stdout=subprocess.PIPE)
        for _ in range(rounds):
            child.stdout.readline()
        child.kill()
        child.communicate()
        assert differences(read(target), full) == []


def test_interrupt_while_building_is_kept_until_the_file_is_closed(tmp_path):
    body = f"""
from prism_tools.graph import file
fill = file._fill
def fill_and_be_interrupted(*args):
    os.kill(os.getpid(), signal.SIGINT)
    fill(*args)
file._fill = fill_and_be_interrupted
try:
    write(train4(), {str(tmp_path / "g.h5")!r})
except KeyboardInterrupt:
    print("interrupted", os.listdir({str(tmp_path)!r}))
"""
    child = python(body, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.communicate() == (b"interrupted []\n", b"")
