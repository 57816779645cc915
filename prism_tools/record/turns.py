"""Turns: at most N ranks run at a time on a machine; the others are ready, blocked or gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from prism_tools.capture import wire
from prism_tools.capture.server import Here, Operation, Rank
from prism_tools.record.polls import Polls

LOOKAHEAD = 4  # ready ranks among which a wanted one is looked for


class State(Enum):
    READY = 0
    ACTIVE = 1
    BLOCKED = 2
    LEFT = 3


@dataclass
class Turn:
    """What the coordinator knows of one rank's turn. ``resume`` is sent when it gets the next one."""

    rank: Rank
    eager_sends: bool = False  # nobody waits for a send
    state: State = State.READY
    resume: Callable[[], None] | None = None
    waits: int = 0  # opid that the main thread waits for; 0: none or a store key
    wait_peer: wire.Peer | None = None
    store_keys: bool = False
    sleeps: int = 0
    issued: dict[int, Operation] = field(default_factory=dict)  # not complete yet
    done: dict[int, tuple[tuple, wire.Parcel]] = field(default_factory=dict)  # complete, nobody has asked yet
    asked: dict[int, wire.Peer] = field(default_factory=dict)  # other threads that wait
    last: Operation | None = None
    polls: Polls = field(default_factory=Polls)

    def operation(self) -> Operation | None:
        """The operation that it waits for, or polls, or that another of its threads waits for while it is stalled."""
        if self.waits:
            return self.issued.get(self.waits)
        if self.polls.since:
            return self.issued.get(self.polls.question[1]) if self.polls.question[0] == "test" else None
        opids = [*self.asked, *sorted(self.rank.watched)] if self.is_stalled() else []
        return next((self.issued[opid] for opid in opids if opid in self.issued), None)

    def is_stalled(self) -> bool:
        """Whether it has lost its turn without having said that it waits."""
        return self.state is State.BLOCKED and not self.waits and not self.store_keys


class Turns(dict[int, Turn]):
    """Turn by rank. ``slots``: ranks at a time on a machine; ``wanted``: whether others wait for this rank, which then
    goes first."""

    def __init__(self, slots: int, wanted: Callable[[int], bool]) -> None:
        super().__init__()
        self.slots = slots
        self.ready: dict[Here, deque[int]] = {}
        self.running: dict[Here, int] = {}
        self.active = 0  # on all machines
        self.switches = 0
        self._wanted = wanted

    def any_can_run(self) -> bool:
        """Whether a rank runs or is ready to."""
        return self.active > 0 or self.queued() > 0

    def queued(self) -> int:
        """How many ranks are ready to run."""
        return sum(map(len, self.ready.values()))

    def start(self) -> None:
        """Give free slots to ready ranks."""
        for place, ready in self.ready.items():
            while ready and self.running.get(place, 0) < self.slots:
                turn = self[self._next(ready)]
                self._count(turn, 1)
                turn.state = State.ACTIVE
                self.switches += 1
                resume, turn.resume = turn.resume, None
                if resume is not None:
                    resume()

    def _count(self, turn: Turn, change: int) -> None:
        place = turn.rank.place
        self.running[place] = self.running.get(place, 0) + change
        self.active += change

    def _next(self, ready: deque[int]) -> int:
        """The oldest ready rank, or one near it that is wanted."""
        for k in range(min(LOOKAHEAD, len(ready))):
            number = ready[k]
            if self._wanted(number):
                del ready[k]
                return number
        return ready.popleft()

    def make_ready(self, turn: Turn, resume: Callable[[], None]) -> None:
        """It may go on, with ``resume``, when there is a slot."""
        turn.state = State.READY
        turn.resume = resume
        turn.waits = 0
        turn.store_keys = False
        self.ready.setdefault(turn.rank.place, deque()).append(turn.rank.number)

    def give_way(self, turn: Turn, resume: Callable[[], None]) -> None:
        """An active rank goes to the end of the queue."""
        self._count(turn, -1)
        self.make_ready(turn, resume)

    def block(self, turn: Turn) -> None:
        """It waits: its slot is free."""
        if turn.state is State.ACTIVE:
            turn.state = State.BLOCKED
            self._count(turn, -1)

    def leave(self, turn: Turn) -> None:
        """Its program is over, or it is gone."""
        self.block(turn)
        turn.state = State.LEFT

    def wake(self, turn: Turn) -> None:
        """It had looked stalled, and is not: it runs already, in a slot or beyond them."""
        if turn.state is State.READY:
            self.ready[turn.rank.place].remove(turn.rank.number)
        turn.state = State.ACTIVE
        self._count(turn, 1)
