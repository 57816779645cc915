"""One node of an allocation as a server sees it: its ranks' lines, its agent's answers, its clock, its end."""

from __future__ import annotations

import pickle
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prism_tools.capture import clock, ranks, wire
from prism_tools.capture.link import CONTROL, MAIN, Frame, Link
from prism_tools.capture.server import Here, Rank
from prism_tools.capture.wire import EMPTY
from prism_tools.errors import PrismError
from prism_tools.graph.names import ranks_text

if TYPE_CHECKING:
    from prism_tools.capture.server import Server

ANSWER = 60.0  # seconds that an agent gets to answer a question about its processes


class Line(wire.Peer):
    """A rank's socket on its node, as seen from here. ``serial``: which of the ranks that were ever forked there."""

    def __init__(self, link: Link, serial: int, channel: int) -> None:
        self.link, self.serial, self.channel = link, serial, channel

    def send_pickled(self, blob: bytes, parcel: wire.Parcel = wire.NOTHING) -> None:
        self.link.send(self.serial, self.channel, blob, parcel.view())

    def close(self) -> None:
        """Its node's agent does that."""


class Node(Here):
    """A node with an agent, task number ``task`` of the step. Serves one server at a time.

    Where an assistant stands between (``beside``: its node), that passes on all but what is meant for itself.
    """

    def __init__(self, task: int, name: str, sock: socket.socket) -> None:
        self.task, self.name = task, name
        self.link = Link(sock, set())
        self.server: Server | None = None
        self.gone = False
        self._serial = 0
        self._ranks: dict[int, Rank] = {}  # of the server, by serial
        self._lines: dict[tuple[int, int], Line] = {}
        self._later: deque[Frame] = deque()  # came while an answer was waited for
        self._answers: list[Any] = []
        self.holds: object = None  # what the assistant beside it was last sent whole

    def pair(self, agent: Node, secret: str) -> None:
        """Become ``agent``'s node, as the assistant sees it that has come from here and has told its address."""
        agent.tell("through", *self.answer(ANSWER), secret)
        agent.answer(ANSWER)
        agent.close()
        self.beside, self.name = self.name, agent.name
        self.answer(None)  # it may still import torch

    def serve(self, server: Server) -> None:
        """Fork ranks for ``server`` from now on. Compares the clocks."""
        self.first = self.compared()
        self.clock = clock.Clock(self.first.offset, 0, self.first.error)
        self.server = server
        self.link.full = server.full
        server.selector.register(self.link.sock, selectors.EVENT_READ, self._read)

    def release(self) -> None:
        """The server is about to close. An agent that still has ranks of it is left, and so ends them."""
        if self.gone or self.server is None:
            return
        if any(not rank.gone for rank in self._ranks.values()):
            self.close()
            return
        if self.beside:
            self.tell("rest")
        self.server.selector.unregister(self.link.sock)
        self.server = None
        self._ranks, self._lines = {}, {}

    def spawn(self, spec: ranks.Spec) -> Rank:
        """Have a rank forked there; its pid is 0 until that has been done."""
        self._serial += 1
        line = self._lines[self._serial, MAIN] = Line(self.link, self._serial, MAIN)
        rank = self._ranks[self._serial] = Rank(spec.rank, 0, line, self)
        self.tell("spawn", self._serial, spec)
        return rank

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function``, of a module, says there. PrismError if the agent is gone or does not answer."""
        if self.gone:
            self._lost("its agent is gone")
        self.tell("ask", function, arguments)
        return self.answer(ANSWER)

    def compared(self) -> clock.Sample:
        """Its clock against ours, now."""
        return clock.compare(lambda: self.ask(clock.reading))

    def answer(self, limit: float | None) -> Any:
        """Wait for the agent's answer, for ``limit`` seconds at most."""
        deadline = None if limit is None else time.monotonic() + limit
        while not self._answers:
            writable = [self.link.sock] if self.link.queued else []
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not any(select.select([self.link.sock], writable, [], left)):
                self._lost(f"its agent has not answered for {limit:.0f} s")
            self.link.flush()
            for frame in self._frames():
                if frame[1] != CONTROL or not self._is_answer(frame):
                    self._later.append(frame)
        return self._answers.pop()

    def _frames(self) -> Iterator[Frame]:
        try:
            yield from self.link.frames()
        except EOFError as error:
            who = f"its assistant on node {self.beside}" if self.beside else "its agent"
            self._lost(f"{who} is gone{f' ({error})' if str(error) else ''}")

    def _is_answer(self, frame: Frame) -> bool:
        kind, *values = pickle.loads(frame[2])
        if kind == "failed":
            self._lost(values[0])
        if kind == "answer":
            self._answers += values
        return kind == "answer"

    def catch_up(self) -> bool:
        """Handle what came while an answer was waited for; whether there was anything."""
        found = bool(self._later)
        while self._later:
            self._handle(*self._later.popleft())
        return found

    def _read(self) -> None:
        """Handle what has arrived. PrismError when the agent is gone."""
        for frame in self._frames():
            self._later.append(frame)
            self.catch_up()

    def _handle(self, serial: int, channel: int, blob: memoryview, payload: memoryview) -> None:
        rank = self._ranks.get(serial)
        if rank is None:
            if serial == CONTROL and pickle.loads(blob)[0] == "failed":
                self._lost(pickle.loads(blob)[1])
            return  # of a rank of the server before: of a thread that had something to say when its process ended
        assert self.server is not None
        if channel != CONTROL:
            self.server.arrived(rank, self._lines[serial, channel], blob, payload, [])
            return
        kind, *values = pickle.loads(blob)
        if kind == "forked":
            rank.pid = values[0]
        elif kind == "channel":
            which, number = values
            line = self._lines[serial, number] = Line(self.link, serial, number)
            rank.adopt(which, line)
        elif kind == "gone":
            self.server.ended(rank, values[0])

    def tell(self, *message: Any, payload: memoryview = EMPTY) -> None:
        """Words to the agent, or to the assistant before it."""
        self.link.send(CONTROL, CONTROL, pickle.dumps(message, 5), payload)

    def _lost(self, why: str) -> None:
        mine = sorted(rank.number for rank in self._ranks.values() if not rank.gone)
        self.close()
        what = f"; rank{'s' if len(mine) > 1 else ''} {ranks_text(mine)} ran there" if mine else ""
        raise PrismError(f"node {self.name}: {why}{what}")

    def close(self) -> None:
        """Close the line; the agent then ends its ranks, and itself."""
        if self.gone:
            return
        self.gone = True
        self._later.clear()
        if self.server is not None:
            self.server.selector.unregister(self.link.sock)
            for rank in self._ranks.values():
                if not rank.gone:
                    rank.gone = True
                    self.server.alive -= 1
        self.link.close()
