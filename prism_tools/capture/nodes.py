"""Nodes of a Slurm allocation on which a server's ranks run: an agent on each forks its share, the server is here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import secrets
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prism_tools.capture import clock, ranks, wire
from prism_tools.capture.link import CONTROL, MAIN, Frame, Guest, Link
from prism_tools.capture.server import Here, Rank
from prism_tools.errors import PrismError
from prism_tools.graph.names import ranks_text
from prism_tools.launch.slurm import Place, srun

if TYPE_CHECKING:
    from prism_tools.capture.server import Server

CONNECT = 120.0  # seconds that nodes get to start Python and to connect
ANSWER = 60.0  # seconds that an agent gets to answer a question about its processes
LAST_OUTPUT = 30.0  # seconds that srun gets to pass on what ranks have printed, once the agents are gone

# Beside what launch/slurm.py says. The job's nodes may be held by the step that we are; the end of one agent, or of a
# node, must leave the others their time to send traces.
STEP = ("--overlap", "--mem=0", "--export=ALL", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--quiet")


class Line(wire.Peer):
    """A rank's socket on its node, as seen from here. ``serial``: which of the ranks that were ever forked there."""

    def __init__(self, link: Link, serial: int, channel: int) -> None:
        self.link, self.serial, self.channel = link, serial, channel

    def send_pickled(self, blob: bytes, parcel: wire.Parcel = wire.NOTHING) -> None:
        self.link.send(self.serial, self.channel, blob, parcel.view())

    def close(self) -> None:
        """Its node's agent does that."""


class Node(Here):
    """A node with an agent, task number ``task`` of the step. Serves one server at a time."""

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
        self.server.selector.unregister(self.link.sock)
        self.server = None
        self._ranks, self._lines = {}, {}

    def spawn(self, spec: ranks.Spec) -> Rank:
        """Have a rank forked there; its pid is 0 until that has been done."""
        self._serial += 1
        line = self._lines[self._serial, MAIN] = Line(self.link, self._serial, MAIN)
        rank = self._ranks[self._serial] = Rank(spec.rank, 0, line, self)
        self._tell("spawn", self._serial, spec)
        return rank

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function``, of a module, says there. PrismError if the agent is gone or does not answer."""
        if self.gone:
            self._lost("its agent is gone")
        self._tell("ask", function, arguments)
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
            self._lost(f"its agent is gone{f' ({error})' if str(error) else ''}")

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

    def _tell(self, *message: Any) -> None:
        self.link.send(CONTROL, CONTROL, pickle.dumps(message, 5))

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


class Nodes:
    """``place.nodes`` nodes of the allocation, for one server after another. Close it whatever happens."""

    def __init__(self, tool: str, place: Place) -> None:
        self.tool, self.place = tool, place
        self.nodes: list[Node] = []
        self.step: subprocess.Popen[bytes] | None = None

    def start(self, warm: bool, modules: Sequence[str], pretend: bool) -> None:
        """Start the agents and wait until they, and we, have preloaded: see ranks.preload. PrismError: what went wrong."""
        secret = secrets.token_hex(32)
        with _listener() as listener:
            hello = {
                "tool": self.tool,
                "host": socket.gethostname(),
                "port": listener.getsockname()[1],
                "secret": secret,
                "limit": CONNECT,
                "environ": dict(os.environ),
                "cwd": os.getcwd(),
                "path": sys.path,
                "warm": warm,
                "modules": list(modules),
                "pretend": pretend,
            }
            self.step = _start_step(self.place, json.dumps(hello).encode() + b"\n")
            ranks.limits()  # imports torch, as the agents do at the same time
            self._gather(listener, secret)
        self.nodes.sort(key=lambda node: node.task)
        for node in self.nodes:
            node.answer(None)

    def _gather(self, listener: socket.socket, secret: str) -> None:
        """Let the agents in, and nobody else."""
        guests: list[Guest] = []
        deadline = time.monotonic() + CONNECT
        while len(self.nodes) < self.place.nodes:
            assert self.step is not None
            came = f"the agents of {len(self.nodes)} of {self.place.nodes} nodes"
            if self.step.poll() is not None:
                raise PrismError(f"srun: ended when only {came} had come; see its messages above")
            if time.monotonic() > deadline:
                names = ", ".join(sorted(node.name for node in self.nodes))
                raise PrismError(f"srun: only {came} came in {CONNECT:.0f} s ({names}); is Python slow there?")
            waiting = [listener, *(guest.sock for guest in guests)]
            if listener in select.select(waiting, [], [], 0.2)[0]:
                guests.append(Guest(listener.accept()[0]))
            for guest in list(guests):
                task, name = guest.heard(secret)
                if task is not None:
                    guests.remove(guest)
                    if name:
                        self.nodes.append(Node(task, name, guest.sock))
        for guest in guests:
            guest.sock.close()

    def serve(self, server: Server) -> None:
        """Lend the nodes to ``server``."""
        for node in self.nodes:
            node.serve(server)

    def spawn(self, spec: ranks.Spec) -> Rank:
        """Have a rank forked: those that run together in equal runs, so that neighbours share a node."""
        together = sorted(spec.sandbox) or range(spec.world_size)
        return self.nodes[together.index(spec.rank) * len(self.nodes) // len(together)].spawn(spec)

    def catch_up(self) -> bool:
        """Handle what came while answers were waited for; whether there was anything."""
        return any([node.catch_up() for node in self.nodes])

    def clocks(self) -> dict[Here, clock.Clock]:
        """Each node's clock against the first one's, from when the server was served until now."""
        lasts = [node.compared() for node in self.nodes]
        leader = self.nodes[0]
        return {
            node: clock.between(node.first.beyond(leader.first), last.beyond(lasts[0]))
            for node, last in zip(self.nodes, lasts, strict=True)
        }

    def release(self) -> None:
        """The server that they were lent to is about to close."""
        for node in self.nodes:
            node.release()

    def close(self) -> None:
        """End the agents and what they have forked; safe to call twice."""
        for node in self.nodes:
            node.close()
        if self.step is not None:
            _end_step(self.step, LAST_OUTPUT if self.nodes else 0)


@contextlib.contextmanager
def ready(
    tool: str, place: Place | None, warm: bool = False, modules: Sequence[str] = (), pretend: bool = False
) -> Iterator[Nodes | None]:
    """Where a server's ranks can be forked: on ``place``'s nodes, or (None) in this process. Preloaded, see ranks.preload."""
    if place is None:
        ranks.preload(warm, modules, pretend)
        yield None
        return
    nodes = Nodes(tool, place)
    try:
        nodes.start(warm, modules, pretend)
        yield nodes
    finally:
        nodes.close()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _start_step(place: Place, hello: bytes) -> subprocess.Popen[bytes]:
    """An agent on each node. What they need to know, secret included, goes where nobody else can read it."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        need = place.nodes + place.beside
        raise PrismError(f"--nodes {need}: this is no Slurm allocation; get one: salloc --nodes={need}", status=2)
    step = subprocess.Popen(
        [*srun(place.nodes, place.nodes), *place.words, *STEP, sys.executable, "-m", "prism_tools.capture.agent"],
        stdin=subprocess.PIPE,
        process_group=0,  # Ctrl-C reaches the tool, which ends it
        preexec_fn=lambda: ctypes.CDLL(None).prctl(ranks.PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    assert step.stdin is not None
    with contextlib.suppress(BrokenPipeError), step.stdin:  # its end is noticed elsewhere
        step.stdin.write(hello)
    return step


def _end_step(step: subprocess.Popen[bytes], patience: float) -> None:
    for end in (lambda: None, step.terminate, step.kill):
        end()
        try:
            step.wait(patience)
            return
        except subprocess.TimeoutExpired:
            patience = 10.0
