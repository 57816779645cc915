"""Run by test_stamp.py with the stamp library preloaded and the stand-in for the CUDA runtime as argument: what the library
makes of a program's calls. Prints JSON: name -> result of each function here."""

import ctypes
import json
import sys
import time

import numpy as np

from prism_tools.gpu.stamp import PLACE, ROW, Stamps

runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
program = ctypes.CDLL(None)  # finds what a program would: the preloaded names first
for name in ("cudaEventRecord", "cudaEventRecordWithFlags", "cudaStreamWaitEvent", "cudaEventSynchronize"):
    getattr(program, name).argtypes = (
        [ctypes.c_void_p] * 2 + [ctypes.c_uint] if "Sync" not in name else [ctypes.c_void_p]
    )
program.cudaEventRecord.argtypes = [ctypes.c_void_p] * 2
program.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
OTHER, BROKEN = 0xBAD, 0xDEAD  # streams: of the other device, and one on which everything fails


def event():
    made = ctypes.c_void_p()
    runtime.cudaEventCreate(ctypes.byref(made))
    return made.value


def count(name):
    return ctypes.c_int.in_dll(runtime, name).value


def off():
    """Nothing is logged, everything passes."""
    statuses = [program.cudaEventRecord(event(), 1), program.cudaEventRecordWithFlags(event(), 1, 5)]
    return [*statuses, program.cudaStreamWaitEvent(1, event(), 0), count("records"), count("waits"), *stamps.used()]


def logged():
    """Kinds, streams and whether stamped, of one of everything."""
    stamps.reserve(4096, 4096)
    stamps.start()
    first, second = event(), event()
    program.cudaEventRecord(first, 1)  # 1 is another name of 0
    program.cudaEventRecordWithFlags(second, 0x20, 0)
    program.cudaStreamWaitEvent(0x30, first, 0)
    program.cudaStreamSynchronize(0x20)
    program.cudaEventSynchronize(first)
    program.cudaDeviceSynchronize()
    return len(rows()), rows()


def operation():
    """An asynchronous operation's own calls: the caller's stream is handed over without a stamp, the backend's end has one."""
    before = time.monotonic_ns()
    begin = len(rows())
    stamps.call(0x20, 7, 1, before)
    handed, end = event(), event()
    program.cudaEventRecord(handed, 0x20)
    program.cudaStreamWaitEvent(0x40, handed, 0)
    program.cudaEventRecord(end, 0x40)
    stamps.leave(7, 0)
    stamps.call(0x20, 8, 0, before)
    stamps.leave(8, 0)
    stamps.leave(9, 0)  # nothing is open
    return rows()[begin:]


def errors():
    """The program gets the runtime's own error, ours is forgotten; the log has ended, and cannot be read."""
    stamps._lib.prism_switch(1)
    forgotten = count("errors_forgotten")
    statuses = [program.cudaEventRecord(event(), BROKEN), program.cudaStreamSynchronize(BROKEN)]
    ended = len(rows())
    program.cudaEventRecord(event(), 0x20)
    try:
        stamps.read()
    except RuntimeError as problem:
        return [*statuses, count("errors_forgotten") - forgotten, len(rows()) - ended, str(problem)]


def other_device():
    """Nothing of it is logged, whichever way it is named, and the log stays whole: also where room is made meanwhile."""
    begin, device, room = len(rows()), ctypes.c_int.in_dll(runtime, "current"), event()
    device.value = 1
    theirs = event()
    statuses = [program.cudaEventRecord(theirs, stream) for stream in (OTHER, None, 1)]
    statuses += [program.cudaStreamSynchronize(None), program.cudaDeviceSynchronize()]
    statuses += [program.cudaMemcpy(None, None, ctypes.c_size_t(0), 0)]
    program.cudaStreamSynchronize(OTHER)
    for _ in range(5000):
        program.cudaEventRecord(room, 0x20)
    statuses.append(device.value)
    device.value = 0
    log, times, _ = stamps.read()
    return statuses, [row for row in rows()[begin:] if row[1] != 0x20], int(np.sum(log["stream"] == OTHER))


def capture():
    """While a graph is captured nothing is added to it."""
    begin = len(rows())
    program.cudaStreamBeginCapture(ctypes.c_void_p(0x20), 0)
    inside = [stamps.call(0x20, 1, 0, 0), stamps.capturing()]
    stamps.mark(0x20, 0, 1)  # an optimizer step in the graph
    program.cudaEventRecord(event(), 0x20)
    end = ctypes.c_void_p(0x20), ctypes.byref(ctypes.c_void_p())
    program.cudaStreamEndCapture(*end)
    program.cudaStreamEndCapture(*end)  # one that began before anybody looked
    program.cudaStreamBeginCaptureToGraph(ctypes.c_void_p(0x20), None, None, None, ctypes.c_size_t(0), 0)
    inside.append(stamps.capturing())
    program.cudaStreamEndCapture(*end)
    logged = len(rows()) - begin
    after = stamps.call(0x20, 1, 0, 0)
    stamps.leave(1, 0)
    return [*inside, after, logged]


def copies():
    """The host waits for a copy to memory that is not pinned (0x7000 is), and nothing else is a wait."""
    begin = len(rows())
    arguments = [ctypes.c_void_p(0x9000), ctypes.c_size_t(8)]
    statuses = []
    for to, kind in ((0x8000, 2), (0x7000, 2), (0x8000, 1)):
        statuses.append(program.cudaMemcpyAsync(ctypes.c_void_p(to), *arguments, kind, ctypes.c_void_p(0x20)))
    return statuses, rows()[begin:]


def destroyed():
    """A stream that is gone is not stamped when the whole device is waited for."""
    program.cudaEventRecord(event(), 0x60)
    program.cudaStreamDestroy(ctypes.c_void_p(0x60))
    begin = len(rows())
    program.cudaDeviceSynchronize()
    return [row[1] for row in rows()[begin:]]


def more():
    """Without room made ahead there is room."""
    before, shared = stamps.used()[1], event()
    for _ in range(5000):
        program.cudaEventRecord(shared, 0x70)
    return stamps.used()[1] - before


def hold():
    """The stand-in runs a stream's functions at once, so that a hold lasts for its limit."""
    before = time.monotonic_ns()
    stamps.hold(0x20, 100_000_000)
    held = time.monotonic_ns() - before
    stamps.hold(0x20, 0)
    return [held >= 100_000_000, time.monotonic_ns() - before - held < 100_000_000]


def known():
    """What stamping skips, once an iteration's points are known."""
    places = np.array([(0x20, 0, 1), (0x30, 1, 0), (0x20, 0, 1)], PLACE)
    stamps._lib.prism_learn(places.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(places)))
    stamps.mark(0x20, 0, 1)
    begin = len(rows())
    program.cudaEventRecord(event(), 0x20)
    program.cudaStreamWaitEvent(0x30, event(), 0)
    program.cudaEventRecord(event(), 0x50)
    return rows()[begin:]


def read():
    """Stamps are on the host's clock: between the call and its return."""
    stamps.stop()
    log, times, error = stamps.read()
    stamped = log[log["stamp"] >= 0]
    at = times[stamped["stamp"]]
    near = np.all((at >= stamped["before"] - error - 1000) & (at <= stamped["issued"] + error + 1000))
    return [bool(near), bool(np.all(log["before"] <= log["issued"])), len(stamped) > 5]


def rows():
    log = np.zeros(stamps.used()[0], ROW)
    stamps._lib.prism_copy_rows(log.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(log)))
    return [[int(row["kind"]), int(row["stream"]), int(row["stamp"] >= 0), int(row["node"])] for row in log]


CHECKS = (off, logged, operation, other_device, capture, hold, copies, destroyed, more, known, read, errors)

if __name__ == "__main__":
    stamps = Stamps()
    print(json.dumps({check.__name__: check() for check in CHECKS}))
