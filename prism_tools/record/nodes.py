"""A recording over several nodes of a Slurm allocation: an agent on each forks its share of the ranks, the coordinator is here."""

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
from collections.abc import Callable, Sequence
from typing import Any

from prism_tools.capture import ranks, wire
from prism_tools.capture.server import Here, Rank
from prism_tools.errors import PrismError
from prism_tools.graph.names import ranks_text
from prism_tools.launch.slurm import srun
from prism_tools.record.coordinator import Coordinator
from prism_tools.record.link import CONTROL, MAIN, Frame, Guest, Link

CONNECT = 120.0  # seconds that nodes get to start Python and to connect
ANSWER = 60.0  # seconds that an agent gets to answer a question about its processes
LAST_OUTPUT = 30.0  # seconds that srun gets to pass on what ranks have printed, once the agents are gone

# Beside what launch/slurm.py says. The job's nodes may be held by the step that we are; the end of one agent, or of a
# node, must leave the others their time to send traces.
STEP = ("--overlap", "--mem=0", "--export=ALL", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--quiet")


class Line(wire.Peer):
    """A rank's socket on its node, as seen from here."""

    def __init__(self, link: Link, rank: int, channel: int) -> None:
        self.link, self.rank, self.channel = link, rank, channel

    def send_pickled(self, blob: bytes, parcel: wire.Parcel = wire.NOTHING) -> None:
        self.link.send(self.rank, self.channel, blob, parcel.view())

    def close(self) -> None:
        """Its node's agent does that."""


class Node(Here):
    """A node with an agent, task number ``task`` of the step: where ``coordinator`` lets ranks run."""

    def __init__(self, task: int, name: str, sock: socket.socket, coordinator: NodesCoordinator) -> None:
        self.task, self.name = task, name
        self.coordinator = coordinator
        self.link = Link(sock, coordinator.full)
        coordinator.selector.register(sock, selectors.EVENT_READ, self.read)
        self.lines: dict[tuple[int, int], Line] = {}
        self.ready = self.gone = False
        self._later: deque[Frame] = deque()  # came while an answer was waited for
        self._answers: list[Any] = []

    def spawn(self, spec: ranks.Spec) -> Rank:
        """Have a rank forked there."""
        line = self.lines[spec.rank, MAIN] = Line(self.link, spec.rank, MAIN)
        self._tell("spawn", spec)
        return Rank(spec.rank, 0, line, self)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function``, of a module, says there. PrismError if the agent is gone or does not answer."""
        if self.gone:
            self._lost("its agent is gone")
        self._tell("ask", function, arguments)
        deadline = time.monotonic() + ANSWER
        while not self._answers:
            writable = [self.link.sock] if self.link.queued else []
            if not any(select.select([self.link.sock], writable, [], max(deadline - time.monotonic(), 0))):
                self._lost(f"its agent has not answered for {ANSWER:.0f} s")
            self.link.flush()
            try:
                for frame in self.link.frames():
                    if frame[1] != CONTROL or not self._is_answer(frame):
                        self._later.append(frame)
            except EOFError as error:
                self._lost(f"its agent is gone{f' ({error})' if str(error) else ''}")
        return self._answers.pop()

    def _is_answer(self, frame: Frame) -> bool:
        kind, *values = pickle.loads(frame[2])
        if kind == "answer":
            self._answers += values
        return kind == "answer"

    def catch_up(self) -> bool:
        """Handle what came while an answer was waited for; whether there was anything."""
        found = bool(self._later)
        while self._later:
            self._handle(*self._later.popleft())
        return found

    def read(self) -> None:
        """Handle what has arrived. PrismError when the agent is gone."""
        try:
            for frame in self.link.frames():
                self._later.append(frame)
                self.catch_up()
        except EOFError as error:
            self._lost(f"its agent is gone{f' ({error})' if str(error) else ''}")

    def _handle(self, number: int, channel: int, blob: memoryview, payload: memoryview) -> None:
        if channel != CONTROL:
            line = self.lines[number, channel]
            self.coordinator.arrived(self.coordinator.ranks[number], line, blob, payload, [])
            return
        kind, *values = pickle.loads(blob)
        if kind == "ready":
            self.ready = True
        elif kind == "failed":
            self._lost(values[0])
        elif kind == "forked":
            self.coordinator.ranks[values[0]].pid = values[1]
        elif kind == "channel":
            number, which, channel = values
            line = self.lines[number, channel] = Line(self.link, number, channel)
            self.coordinator.ranks[number].adopt(which, line)
        elif kind == "gone":
            self.coordinator.ended(self.coordinator.ranks[values[0]], values[1])

    def _tell(self, *message: Any) -> None:
        self.link.send(CONTROL, CONTROL, pickle.dumps(message, 5))

    def _lost(self, why: str) -> None:
        mine = sorted(rank.number for rank in self.coordinator.ranks.values() if rank.place is self and not rank.gone)
        self.close()
        what = f"; rank{'s' if len(mine) > 1 else ''} {ranks_text(mine)} ran there" if mine else ""
        raise PrismError(f"node {self.name}: {why}{what}")

    def close(self) -> None:
        """Close the line; the agent then ends its ranks, and itself."""
        if self.gone:
            return
        self.gone = True
        self._later.clear()
        self.coordinator.selector.unregister(self.link.sock)
        self.link.close()
        for rank in self.coordinator.ranks.values():
            if rank.place is self and not rank.gone:
                rank.gone = True
                self.coordinator.alive -= 1


class NodesCoordinator(Coordinator):
    """A coordinator whose ``world`` ranks run on ``count`` nodes, neighbours together."""

    def __init__(self, count: int, world: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count, self.world = count, world
        self.nodes: list[Node] = []
        self.step: subprocess.Popen[bytes] | None = None

    def prepare(self, modules: Sequence[str], pretend: bool) -> None:
        """Start the agents and wait until they have preloaded. PrismError: what went wrong."""
        secret = secrets.token_hex(32)
        with _listener() as listener:
            hello = {
                "host": socket.gethostname(),
                "port": listener.getsockname()[1],
                "secret": secret,
                "limit": CONNECT,
                "environ": dict(os.environ),
                "cwd": os.getcwd(),
                "path": sys.path,
                "modules": list(modules),
                "pretend": pretend,
            }
            self.step = _start_step(self.count, json.dumps(hello).encode() + b"\n")
            ranks.limits()  # imports torch, as the agents do at the same time
            self._gather(listener, secret)
        self.nodes.sort(key=lambda node: node.task)
        while not all(node.ready for node in self.nodes):
            self.poll(None)

    def _gather(self, listener: socket.socket, secret: str) -> None:
        """Let the agents in, and nobody else."""
        guests: list[Guest] = []
        deadline = time.monotonic() + CONNECT
        while len(self.nodes) < self.count:
            assert self.step is not None
            came = f"the agents of {len(self.nodes)} of {self.count} nodes"
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
                        self.nodes.append(Node(task, name, guest.sock, self))
        for guest in guests:
            guest.sock.close()

    def spawn(self, spec: ranks.Spec) -> Rank:
        node = self.nodes[spec.rank * len(self.nodes) // self.world]
        rank = self.ranks[spec.rank] = node.spawn(spec)
        self.alive += 1
        return rank

    def poll(self, timeout: float | None) -> bool:
        caught_up = [node.catch_up() for node in self.nodes]
        return super().poll(0 if any(caught_up) else timeout) or any(caught_up)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        super().close()
        if self.step is not None:
            _end_step(self.step, LAST_OUTPUT if self.nodes else 0)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _start_step(count: int, hello: bytes) -> subprocess.Popen[bytes]:
    """One agent on each of ``count`` nodes. What they need to know, secret included, goes where nobody else can read it."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise PrismError(f"--nodes {count}: this is no Slurm allocation; get one: salloc --nodes={count}", status=2)
    step = subprocess.Popen(
        [*srun(count, count), *STEP, sys.executable, "-m", "prism_tools.record.agent"],
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
