"""The stamp library without a GPU: it is built once, passes every call on, and logs what it should."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.gpu import stamp
from prism_tools.gpu.stamp import CALL, MARK, POINT, RECORD, RETURN, SYNC_DEVICE, SYNC_EVENT, SYNC_STREAM, WAIT

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
STAMPED, PLAIN = 1, 0


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What preloaded.py printed."""
    folder = tmp_path_factory.mktemp("stamp")
    runtime = folder / "libcudart.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", runtime, HERE / "cudart.c"], check=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    build = "from prism_tools.gpu import stamp; print(stamp.build())"
    library = subprocess.check_output([sys.executable, "-c", build], env=environment, text=True).strip()
    done = subprocess.run(
        [sys.executable, HERE / "preloaded.py", runtime],
        env={**environment, "LD_PRELOAD": library}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_off_it_only_passes_calls_on(results):
    assert results["off"] == [0, 1, 0, 1, 1, 0, 0], "also the error of flags that the runtime refuses"


def test_every_call_is_a_row(results):
    number, rows = results["logged"]
    assert number == len(rows) == 9
    assert rows == [
        [RECORD, 0, STAMPED, -1],
        [RECORD, 0x20, STAMPED, -1],
        [WAIT, 0x30, STAMPED, -1],
        [SYNC_STREAM, 0x20, STAMPED, -1],
        [SYNC_EVENT, 0, PLAIN, -1],
        *([POINT, stream, STAMPED, -1] for stream in (0, 0x20, 0x30)),
        [SYNC_DEVICE, 0, PLAIN, -1],
    ]


def test_an_operation_is_stamped_where_it_begins_and_where_it_ends(results):
    assert results["operation"] == [
        [CALL, 0x20, STAMPED, 7],
        [RECORD, 0x20, PLAIN, -1],
        [WAIT, 0x40, PLAIN, -1],
        [RECORD, 0x40, PLAIN, -1],
        [RETURN, 0x40, STAMPED, 7],
        [CALL, 0x20, STAMPED, 8],
        [RETURN, 0x20, STAMPED, 8],
    ]


def test_errors_are_the_runtimes_own(results):
    assert results["errors"] == [700, 700, 1, 0, "a stamp failed with CUDA error 700: not known"]


def test_another_device_is_not_logged(results):
    statuses, logged, read = results["other_device"]
    assert statuses == [0, 0, 0, 0, 0, 0, 1]
    assert logged == [[RECORD, 0xBAD, PLAIN, -1], [SYNC_STREAM, 0xBAD, PLAIN, -1]] and read == 0, "left out when read"


def test_a_capture_is_left_alone(results):
    assert results["capture"] == [1, 1, 1, 0, 0]


def test_the_host_waits_for_copies_to_memory_that_is_not_pinned(results):
    assert results["copies"] == [[0, 0, 1], [[SYNC_STREAM, 0x20, STAMPED, -1]]]


def test_streams_that_are_gone_are_left_alone(results):
    assert 0x60 not in results["destroyed"] and results["destroyed"][-1] == 0 and 0x20 in results["destroyed"]


def test_room_is_made_when_it_is_needed(results):
    assert results["more"] == 5000


def test_a_hold_ends_by_itself(results):
    assert results["hold"] == [True, True]


def test_known_idle_points_are_not_stamped_as_long_as_they_are_the_same(results):
    """Three points were learnt, the first and the third as idle; then the third is on another stream."""
    assert results["known"] == [[RECORD, 0x20, PLAIN, -1], [WAIT, 0x30, STAMPED, -1], [RECORD, 0x50, STAMPED, -1]]


def test_points_are_idle_where_the_stream_had_nothing_to_do():
    kinds = [MARK, RECORD, WAIT, CALL, RECORD, RETURN, RECORD, RECORD]
    streams = [0x20, 0x20, 0x30, 0x20, 0x20, 0x20, 0x20, 0x20]
    rows = np.zeros(len(kinds), stamp.ROW)
    rows["kind"], rows["stream"], rows["stamp"] = kinds, streams, [0, 1, 2, 3, -1, 4, 5, 6]
    at = np.array([0, 2.8, 3, 50, 0, 90, 93, 120]) * 1e3
    places = stamp._places(rows, at)
    assert places.tolist() == [(0x20, RECORD, 1), (0x30, WAIT, 0), (0x20, RECORD, 1), (0x20, RECORD, 0)]


def test_stamps_are_on_the_hosts_clock(results):
    assert results["read"] == [True, True, True]


def test_it_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = stamp.build()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert stamp.build() == first and [path.name for path in (tmp_path / "prism-tools").iterdir()] == [first.name]


def test_no_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(PrismError, match="no C compiler 'no-such-compiler', which live capture on GPUs needs; set CC"):
        stamp.build()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(PrismError, match="stamp.c: the C compiler failed"):
        stamp.build()
    assert list((tmp_path / "prism-tools").iterdir()) == []


def test_a_process_without_it_says_so():
    with pytest.raises(RuntimeError, match="no C compiler, or the launcher dropped LD_PRELOAD"):
        stamp.Stamps()
