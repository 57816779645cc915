"""Full and read-only disks: one line that says what to do, and an old file is left alone."""

import errno
import os

import pytest

from tests.tools import SUMS, program

FULL = os.strerror(errno.ENOSPC)
READ_ONLY = os.strerror(errno.EROFS)
WRITERS = [
    ("slice", "sliced", ("slice", "run", "-s", 2, "--ranks", "0-1", "--no-probe", "bare")),
    ("calibrate", "calibrated", ("calibrate", "sliced")),
    ("replay", "replayed", ("replay", "-r", "0-1", "calibrated")),
]


def test_payloads_of_a_recording_fill_the_disk(bench, disk):
    folder = disk("size=1m")
    path = folder / "run.h5"
    done = bench.run("record", "-n", 4, "-j", 2, "-o", path, "--", program("gpt.py"), "--pp", 2, expect=1)
    lines = done.stderr.splitlines()
    assert lines[0] == f"prism-record: {folder}/run.payload: {FULL}; free some space or use --tensors none"
    assert all(not line.startswith("prism-record") for line in lines[1:]) and len(lines) <= 2
    assert set(os.listdir(folder)) <= {"run.h5"}


def test_small_payloads_do_not_fit_when_the_file_is_closed(bench, disk):
    folder = disk("size=8k")
    (bench.out / "large.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.broadcast(torch.randint(1 << 62, (5000,)), 0)\n"
    )
    done = bench.run("record", "-n", 2, "-o", folder / "run.h5", "--", "large.py", expect=1)
    assert done.stderr == f"prism-record: {folder}/run.payload: {FULL}; free some space or use --tensors none\n"
    assert os.listdir(folder) == []


def test_the_graph_of_a_recording_does_not_fit(bench, disk, sums):
    folder = disk("size=8k")
    (folder / "run.payload").write_text("old")
    argv = ["record", "-n", 4, "--tensors", "none", "-o", folder / "run.h5", "--", SUMS]
    done = bench.run(*argv, expect=1)
    remedy = "free some, or choose a larger file system"
    assert done.stderr == f"prism-record: {folder}/run.h5: cannot be written: {FULL}; {remedy}\n"
    assert os.listdir(folder) == ["run.payload"] and (folder / "run.payload").read_text() == "old"


@pytest.mark.parametrize(("tool", "name", "call"), WRITERS)
def test_a_graph_does_not_fit(tool, name, call, bench, disk, sums):
    folder = disk("size=8k")
    path = folder / f"{name}.h5"
    path.write_text("old")
    *rest, stage = call
    done = bench.run(*rest, sums[stage], "-o", path, expect=1)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("check rank ")]
    assert lines == [f"prism-{tool}: {path}: cannot be written: {FULL}; free some, or choose a larger file system"]
    assert path.read_text() == "old" and os.listdir(folder) == [f"{name}.h5"]


def test_standard_output_is_full(bench, sums):
    with open("/dev/full", "w") as full:
        children = [
            bench.start("calibrate", sums["sliced"], stdout=full),
            bench.start("inspect", "summary", sums["sliced"], stdout=full),
        ]
        for child in children:
            _, err = child.communicate()
            assert child.returncode == 1 and FULL in err and err.count("\n") == 1, err


def test_a_read_only_folder(bench, disk, sums):
    """record says so before it runs anything."""
    folder = disk("ro")
    done = bench.run("record", "-n", 2, "-o", folder / "run.h5", "--", program("forever.py"), expect=1)
    assert done.stderr == f"prism-record: {folder}/run.h5: cannot write here: {READ_ONLY}\n"
    path = folder / "calibrated.h5"
    done = bench.run("calibrate", sums["sliced"], "-o", path, expect=1)
    assert done.stderr.startswith(f"prism-calibrate: {path}: cannot be written: {READ_ONLY}; ")
    assert done.stderr.count("\n") == 1


def test_no_such_folder(bench, sums):
    done = bench.run("record", "-n", 2, "-o", "none/run.h5", "--", program("forever.py"), expect=1)
    assert done.stderr == f"prism-record: none/run.h5: cannot write here: {os.strerror(errno.ENOENT)}\n"
    done = bench.run("record", "-n", 2, "-o", ".", "--", program("forever.py"), expect=1)
    assert done.stderr == "prism-record: .: is a folder; name a file\n"
    done = bench.run("record", "-n", 2, "-o", "/dev/null", "--", program("forever.py"), expect=1)
    assert done.stderr == "prism-record: /dev/null: is a pipe or a device; name a file, beside which payloads can lie\n"
    done = bench.run("calibrate", sums["sliced"], "-o", "none/x.h5", expect=1)
    assert done.stderr.startswith("prism-calibrate: none/x.h5: cannot be written: ") and done.stderr.count("\n") == 1
