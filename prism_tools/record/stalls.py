"""Ranks that hold a turn and are asleep, as /proc shows them: what in, since when, and whether anything still moves in them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass

from prism_tools.capture.server import Here, Rank

LOOK = 0.5  # seconds between two looks at ranks that say nothing
NOTICE = 5.0  # seconds asleep outside communication after which a rank is named
FOREVER = 20.0  # seconds without any progress after which a rank that nothing will wake counts as blocked for ever
BUSY = 0.1  # share of a core beyond which a process is at work, though its main thread sleeps
STIR = 10  # clock ticks of CPU time that a rank's other threads may take by and by without being progress
ASLEEP = ("S", "D", "T")  # waits, waits for a device, was stopped
TICK = 1 / os.sysconf("SC_CLK_TCK")

# System call → what it waits for, and which argument is a time limit (with the value of "none"); -1: always limited.
_CALLS: dict[str, tuple[str, int | None, int]] = {
    "futex": ("a lock", 3, 0),
    "clock_nanosleep": ("a sleep", -1, 0),
    "nanosleep": ("a sleep", -1, 0),
    "wait4": ("a subprocess", None, 0),
    "waitid": ("a subprocess", None, 0),
    "read": ("a file", None, 0),
    "recvfrom": ("a socket", None, 0),
    "recvmsg": ("a socket", None, 0),
    "accept": ("a socket", None, 0),
    "accept4": ("a socket", None, 0),
    "connect": ("a socket", None, 0),
    "openat": ("a file", None, 0),
    "flock": ("a file lock", None, 0),
    "fcntl": ("a file lock", None, 0),
    "poll": ("a poll", 2, 0xFFFFFFFF),
    "ppoll": ("a poll", 2, 0),
    "select": ("a poll", 4, 0),
    "pselect6": ("a poll", 4, 0),
    "epoll_wait": ("a poll", 3, 0xFFFFFFFF),
    "epoll_pwait": ("a poll", 3, 0xFFFFFFFF),
    "pause": ("a signal", None, 0),
    "rt_sigtimedwait": ("a signal", 2, 0),
}
_NUMBERS = {
    "x86_64": (
        {0: "read", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 45: "recvfrom"}
        | {47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 128: "rt_sigtimedwait", 202: "futex"}
        | {230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll"}
        | {281: "epoll_pwait", 288: "accept4"}
    ),
    "aarch64": (
        {
            22: "epoll_pwait",
            25: "fcntl",
            32: "flock",
            56: "openat",
            63: "read",
            72: "pselect6",
            73: "ppoll",
            95: "waitid",
        }
        | {98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 137: "rt_sigtimedwait", 202: "accept", 203: "connect"}
        | {207: "recvfrom", 212: "recvmsg", 242: "accept4", 260: "wait4"}
    ),
}.get(platform.machine(), {})


@dataclass
class Sight:
    """A process at one moment. ``cpu``: ticks of all its threads; ``switches``: how often its main thread went to sleep."""

    state: str = ""
    cpu: int = 0
    switches: int = 0


@dataclass
class Nap:
    """A rank that has been asleep at every look since ``since``; nothing has moved in it since ``still`` (seconds)."""

    sight: Sight
    looked: float
    since: float
    still: float
    still_cpu: int
    children: tuple[tuple[int, Sight], ...]
    told: bool = False


class Stalls:
    """What several looks have shown, by rank."""

    def __init__(self) -> None:
        self._naps: dict[int, Nap] = {}
        self._next = 0.0
        self._families: dict[Here, dict[int, list[int]]] = {}  # as of this look, on machines that were asked

    def due(self) -> bool:
        """Whether it is time for another look; True at most once every LOOK seconds."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK
        self._families = {}
        return True

    def forget(self, number: int) -> None:
        """The rank has said something."""
        self._naps.pop(number, None)

    def look(self, rank: Rank) -> bool:
        """Look at a rank that runs or seems to; whether it was asleep at this look and the one before."""
        number = rank.number
        now, sight, nap = time.monotonic(), rank.ask(sight_of), self._naps.get(number)
        worked = nap is not None and (sight.cpu - nap.sight.cpu) * TICK > BUSY * (now - nap.looked)
        if sight.state not in ASLEEP or worked:
            self.forget(number)
            return False
        if nap is None:
            self._naps[number] = Nap(sight, now, now, now, sight.cpu, ())
            return False
        children = self._children(rank) if now - nap.since > NOTICE / 2 else ()
        moved = sight.switches != nap.sight.switches or sight.cpu - nap.still_cpu > STIR
        if moved or children != nap.children:
            nap.still, nap.still_cpu = now, sight.cpu
        nap.sight, nap.looked, nap.children = sight, now, children
        return True

    def _children(self, rank: Rank) -> tuple[tuple[int, Sight], ...]:
        place = rank.place
        if place not in self._families:
            self._families[place] = place.ask(families)
        found = list(self._families[place].get(rank.pid, ()))
        for child in found:  # grows meanwhile
            found += self._families[place].get(child, ())
        return tuple((child, place.ask(sight_of, child)) for child in found)

    def asleep_for(self, number: int) -> float:
        """Seconds for which the rank has been asleep; 0.0 if it is awake."""
        nap = self._naps.get(number)
        return time.monotonic() - nap.since if nap else 0.0

    def is_for_ever(self, rank: Rank) -> bool:
        """Whether nothing has moved in the rank for long, and no time limit will wake it or what it has started."""
        nap = self._naps.get(rank.number)
        if nap is None or time.monotonic() - nap.still < FOREVER:
            return False
        return not any(rank.place.ask(call_of, each)[1] for each in (rank.pid, *(child for child, _ in nap.children)))

    def to_name(self, numbers: Iterable[int]) -> list[int]:
        """Those of the ranks that should be named now: asleep for long, nothing at work in them, not named before."""
        found = []
        for number in numbers:
            nap = self._naps.get(number)
            if nap is not None and not nap.told and nap.looked - nap.since >= NOTICE:
                if not any(child.state == "R" for _, child in nap.children):
                    nap.told = True
                    found.append(number)
        return found


def sight_of(pid: int) -> Sight:
    """The process as it is now; an empty state if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        with open(f"/proc/{pid}/status") as status:
            switches = next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt"))
    except (OSError, StopIteration):
        return Sight()
    return Sight(fields[0], int(fields[11]) + int(fields[12]), switches)


def families() -> dict[int, list[int]]:
    """Process → its children."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # ended meanwhile
        found.setdefault(parent, []).append(int(name))
    return found


def call_of(pid: int) -> tuple[str, bool]:
    """What a sleeping process waits in ("a lock (futex)"), and whether a time limit will wake it."""
    if sight_of(pid).state == "T":
        return "a stop (SIGSTOP or the like)", False
    try:
        with open(f"/proc/{pid}/syscall") as call:
            words = call.read().split()
        name = _NUMBERS[int(words[0])]
        what, limit, none = _CALLS[name]
        values = [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, KeyError, IndexError):
        return _channel(pid), False  # not to be known here: nothing may be taken to wake it
    if name == "read":
        what = _file(pid, values[0])
    timed = limit is not None and (limit < 0 or values[limit] & (0xFFFFFFFF if none else -1) != none)
    return f"{what} ({name})", timed


def _channel(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/wchan") as channel:
            text = channel.read()
    except OSError:
        text = "0"
    return f"the kernel ({text})" if text not in ("", "0") else "the kernel"


def _file(pid: int, descriptor: int) -> str:
    """The file that a descriptor stands for: "a pipe", "a socket", or its path."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return "a file"
    kind = path.split(":", 1)[0]
    return f"a {kind}" if kind in ("pipe", "socket") else path
