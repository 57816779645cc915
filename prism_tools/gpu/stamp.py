"""The stamp library (csrc/stamp.c): built on first use with the C compiler, preloaded into the program, called from here."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from prism_tools.errors import PrismError

SOURCE = Path(__file__).with_name("csrc") / "stamp.c"
RECORD, WAIT, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, CALL, RETURN, MARK, POINT = range(9)  # kinds of rows
ROW = np.dtype(
    [("before", "i8"), ("issued", "i8"), ("after", "i8"), ("stream", "u8"), ("event", "u8"),
     ("kind", "i4"), ("stamp", "i4"), ("thread", "i4"), ("node", "i4")]
)  # fmt: skip
PLACE = np.dtype([("stream", "u8"), ("kind", "i4"), ("idle", "i4")])
ELSEWHERE = -3  # a row's stamp: on another device
IDLE = 8_000  # ns between two stamps of a stream without work between them (measured: 2 to 3 µs, after a stalled wait 4 to 7)
PATIENCE = 10  # seconds that the device gets to come to the end of the log
FAULTS = {2: "no memory for more events", 400: "operations on several devices"}
TRIES = 30  # comparisons of the clocks, of which the closest counts


def build() -> Path:
    """The library, compiled once for each version of its source. PrismError without a C compiler."""
    source = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".c", ".h"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism-tools"
    library = cache / f"stamp-{hashlib.sha256(source).hexdigest()[:16]}-{os.uname().machine}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CC") or "cc"
    cache.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=cache, suffix=".so")
    os.close(handle)
    try:
        command = [*compiler.split(), "-O2", "-shared", "-fPIC", "-o", made, str(SOURCE), "-ldl"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise PrismError(f"{SOURCE}: the C compiler failed", detail=done.stderr)
        os.rename(made, library)
    except FileNotFoundError:
        raise PrismError(f"no C compiler {compiler!r}, which live capture on GPUs needs; set CC") from None
    finally:
        Path(made).unlink(missing_ok=True)
    return library


class Stamps:
    """The library in this process, where it was preloaded. RuntimeError elsewhere, or where there is no CUDA runtime."""

    def __init__(self) -> None:
        lib: Any = ctypes.PyDLL(None)  # keeps the interpreter's lock: nothing in it that tracing calls ever blocks
        if not hasattr(lib, "prism_call"):
            raise RuntimeError("the stamp library is not loaded: no C compiler, or the launcher dropped LD_PRELOAD")
        i64, u64, i32 = ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
        lib.prism_python.restype = ctypes.py_object
        lib.prism_mark.argtypes = (u64, i32, i32)
        lib.prism_hold.argtypes = (u64, i64)
        lib.prism_reserve.argtypes = (i64, i64)
        for name in ("prism_reserve", "prism_rows", "prism_events", "prism_anchor"):
            getattr(lib, name).restype = i64
        for name in ("prism_mark", "prism_marked", "prism_switch", "prism_copy_rows", "prism_hold"):
            getattr(lib, name).restype = None
        self._lib = lib
        self._anchors: list[tuple[int, int, int]] = []
        self.call = lib.prism_python(0)  # (stream, node, asynchronous, called) -> whether a graph is being captured
        self.leave = lib.prism_python(1)  # (node, ours)
        self.mark, self.marked = lib.prism_mark, lib.prism_marked
        self.capturing = lib.prism_capturing
        self.hold = lib.prism_hold

    def reserve(self, rows: int, events: int) -> None:
        """Have room for so many rows and events in all."""
        if self._lib.prism_reserve(rows, events):
            raise RuntimeError("no memory for so many events")

    def used(self) -> tuple[int, int]:
        """Rows and events so far."""
        return self._lib.prism_rows(), self._lib.prism_events()

    def start(self) -> None:
        """Compare the clocks, then log."""
        self.anchor()
        self._lib.prism_switch(1)

    def anchor(self) -> None:
        """Compare the clocks on a stream of our own: the program's streams go on."""
        before, after = ctypes.c_int64(), ctypes.c_int64()
        best = None
        for _ in range(TRIES):
            event = self._lib.prism_anchor(ctypes.byref(before), ctypes.byref(after))
            if event < 0:
                raise RuntimeError("the device's clock cannot be read")
            if best is None or after.value - before.value < best[1] - best[0]:
                best = (before.value, after.value, event)
        assert best is not None
        self._anchors.append(best)

    def stop(self) -> None:
        """Log no more."""
        self._lib.prism_switch(0)

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The log: rows (ROW), when each stamp was reached (int64 ns on the host's clock), error bound (ns).

        A device time t is given as the host time at which a call would have reached the device at t: between the two
        lies the launch latency, so that the edge from a call to the device takes no time. RuntimeError if a stamp
        failed, or the device does not come to the end of the log: it may wait for a rank that has failed.
        """
        if error := self._lib.prism_failed():
            raise RuntimeError(f"a stamp failed with CUDA error {error}: {FAULTS.get(error, 'not known')}")
        self.anchor()
        rows = self._rows()
        first, last = self._anchors[0], self._anchors[-1]
        everything = np.arange(self._lib.prism_events(), dtype=np.int64)
        deadline = time.monotonic() + PATIENCE
        while (ns := self._elapsed(everything, first[2])) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("the device did not come to the end of the log")
            time.sleep(0.05)
        rate = (last[0] - first[0]) / (ns[last[2]] - ns[first[2]]) if last is not first else 1.0
        times = first[0] + np.rint(ns * rate).astype(np.int64)
        return rows[rows["stamp"] != ELSEWHERE], times, max(after - before for before, after, _ in (first, last))

    def learn(self) -> bool:
        """Find the points of the iteration before the last step but one at which their streams were idle: they are
        stamped no more. False if the device has not been there yet."""
        rows = self._rows()
        steps = np.flatnonzero((rows["kind"] == MARK) & (rows["event"] == 1))  # those that end an iteration
        if len(steps) < 3:
            return False
        rows = rows[steps[-3] : steps[-2]]
        stamped = rows["stamp"] >= 0
        at = np.zeros(len(rows))
        times = self._elapsed(rows["stamp"][stamped].astype(np.int64), int(rows["stamp"][stamped][0]))
        if times is None:
            return False
        at[stamped] = times
        known = _places(rows, at)
        return self._lib.prism_learn(known.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(known))) == 0

    def _rows(self) -> np.ndarray:
        rows = np.zeros(self._lib.prism_rows(), ROW)
        self._lib.prism_copy_rows(rows.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(rows)))
        return rows[rows["before"] > 0]  # another thread may be writing one

    def _elapsed(self, index: np.ndarray, base: int) -> np.ndarray | None:
        """ns of the events ``index`` after the event ``base``; None if one of them has not been reached yet."""
        ns = np.zeros(len(index))
        pointer = index.ctypes.data_as(ctypes.c_void_p)
        failed = self._lib.prism_elapsed(
            pointer, ctypes.c_int64(len(index)), ctypes.c_int64(base), ns.ctypes.data_as(ctypes.c_void_p)
        )
        if failed == -1:
            raise RuntimeError("the device's events cannot be read")
        return None if failed else ns


def _places(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
    """PLACE of each point (record or wait outside an operation) of an iteration, whose stamps were reached ``at`` ns."""
    last: dict[int, float] = {}  # stream -> when it was where it is
    reached: dict[int, float] = {}  # event -> when it was reached
    recorded: dict[int, list[int]] = {}  # thread with an open operation -> events recorded within it
    found = []
    for row, when in zip(rows, at.tolist(), strict=True):
        kind, stream, event, thread = (int(row[name]) for name in ("kind", "stream", "event", "thread"))
        if kind == CALL:
            recorded[thread] = []
        elif kind == RETURN:
            reached.update(dict.fromkeys(recorded.pop(thread, []), when))
        elif thread in recorded:
            recorded[thread] += [event] * (kind == RECORD)
        elif kind in (RECORD, WAIT):
            idle = when - last.get(stream, -np.inf) < IDLE
            found.append((stream, kind, idle and row["stamp"] != ELSEWHERE))
            if kind == RECORD:
                reached[event] = when
            else:
                when = max(when, reached.get(event, when))
        if row["stamp"] >= 0:
            last[stream] = when
    return np.array(found, PLACE)
