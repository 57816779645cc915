"""Nodes of a Slurm allocation on which a server's ranks run: an agent on each forks its share, the server is here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prism_tools.capture import clock, ranks
from prism_tools.capture.link import Door
from prism_tools.capture.node import Node
from prism_tools.capture.server import Here, Rank
from prism_tools.errors import PrismError
from prism_tools.graph.stream import signals_wait
from prism_tools.launch.slurm import Place, allocated, srun

if TYPE_CHECKING:
    from prism_tools.capture.server import Server

CONNECT = 120.0  # seconds that nodes get to start Python and to connect
LAST_OUTPUT = 30.0  # seconds that srun gets to pass on what ranks have printed, once the agents are gone
AGENT = "prism_tools.capture.agent"
ASSISTANT = "prism_tools.emulate.second"  # started from here, not imported

# Beside what launch/slurm.py says. The job's nodes may be held by the step that we are; the end of one agent, or of a
# node, must leave the others their time to send traces.
STEP = ("--overlap", "--mem=0", "--export=ALL", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--quiet")


class Nodes:
    """``place.nodes`` nodes of the allocation, for one server after another. Close it whatever happens."""

    def __init__(self, tool: str, place: Place) -> None:
        self.tool, self.place = tool, place
        self.nodes: list[Node] = []
        self.steps: list[subprocess.Popen[bytes]] = []

    def start(self, warm: bool, modules: Sequence[str], pretend: bool) -> None:
        """Start the agents and wait until they, and we, have preloaded: see ranks.preload. PrismError: what went wrong."""
        secret = secrets.token_hex(32)
        with listening() as listener:
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
                "first": 0,
            }
            try:
                self._start_step(self.place.nodes, self.place.words, AGENT, hello)
                further = max(self.place.beside - 1, 0)
                if further:
                    self._start_step(further, ("--relative=1",), ASSISTANT, {**hello, "first": self.place.nodes})
                ranks.limits()  # imports torch, as the agents do at the same time
                self._gather(listener, secret, self.place.nodes + further)
            except BaseException:
                self._turn_away(listener)
                raise
        self.nodes.sort(key=lambda node: node.task)
        agents, assistants = self.nodes[: self.place.nodes], self.nodes[self.place.nodes :]
        for node in agents:
            node.answer(None)
        for assistant, agent in zip(assistants, agents[1:], strict=False):
            assistant.pair(agent, secret)
        self.nodes = [node for node in self.nodes if not node.gone]

    def _gather(self, listener: socket.socket, secret: str, count: int) -> None:
        """Let the ``count`` agents and assistants in, and nobody else."""
        deadline = time.monotonic() + CONNECT
        with contextlib.closing(Door(listener, secret)) as door:
            while len(self.nodes) < count:
                came = f"the agents of {len(self.nodes)} of {count} nodes"
                if any(step.poll() is not None for step in self.steps):
                    raise PrismError(f"srun: ended when only {came} had come; see its messages above")
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(node.name for node in self.nodes))
                    raise PrismError(f"srun: only {came} came in {CONNECT:.0f} s ({names}); is Python slow there?")
                ready = select.select(door.sockets(), [], [], 0.2)[0]
                self.nodes += [Node(*admitted) for admitted in door.admitted(ready)]

    def _turn_away(self, listener: socket.socket) -> None:
        """Close the lines, and those of agents that come yet: they end without a word, and so does srun, whose own end would
        have it and Slurm complain."""
        for node in self.nodes:
            node.close()
        self.nodes = []
        for step in self.steps:
            assert step.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                step.stdin.close()  # agents that were not told how to begin wait for it
        deadline = time.monotonic() + LAST_OUTPUT
        while any(step.poll() is None for step in self.steps) and time.monotonic() < deadline:
            if select.select([listener], [], [], 0.1)[0]:
                listener.accept()[0].close()

    def serve(self, server: Server) -> None:
        """Lend the nodes to ``server``."""
        for node in self.nodes:
            node.serve(server)

    def spawn(self, spec: ranks.Spec) -> Rank:
        """Have a rank forked: those that run together in equal runs, so that neighbours share a node."""
        together = sorted(spec.sandbox) or range(spec.world_size)
        return self._node(together.index(spec.rank), len(together)).spawn(spec)

    def _node(self, place: int, count: int) -> Node:
        return self.nodes[place * len(self.nodes) // count]

    def shares(self, together: Sequence[int]) -> dict[Node, list[int]]:
        """Each node's of the ranks that run ``together``."""
        shares: dict[Node, list[int]] = {node: [] for node in self.nodes}
        for place, rank in enumerate(sorted(together)):
            shares[self._node(place, len(together))].append(rank)
        return shares

    def near(self, together: Sequence[int]) -> list[int]:
        """Those of the ranks ``together`` whose values no assistant beside their node has."""
        return [rank for node, mine in self.shares(together).items() if not node.beside for rank in mine]

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
        for step in self.steps:
            _end_step(step, LAST_OUTPUT if self.nodes else 0)

    def _start_step(self, tasks: int, which: Sequence[str], module: str, hello: dict[str, Any]) -> None:
        """``module`` on each of so many nodes. What it needs to know, secret included, goes where nobody else can read it."""
        need = self.place.nodes + self.place.beside
        if "SLURM_JOB_ID" not in os.environ:
            raise PrismError(f"--nodes {need}: this is no Slurm allocation; get one: salloc --nodes={need}", status=2)
        if shutil.which("srun") is None:
            raise PrismError(f"--nodes {need}: no srun on PATH; put Slurm's commands there, or add --nodes 1", status=2)
        have = allocated()
        if have < need and (
            have > 1 or "SLURM_JOB_NUM_NODES" in os.environ
        ):  # where only a job's number is set, srun knows
            problem = f"more than the {have} of this allocation"
            raise PrismError(f"--nodes {need}: {problem}; get one of as many: salloc --nodes={need}", status=2)
        with signals_wait():  # a step that has begun is ended
            step = subprocess.Popen(
                [*srun(tasks, tasks), *which, *STEP, sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                process_group=0,  # Ctrl-C reaches the tool, which ends it
                preexec_fn=lambda: ctypes.CDLL(None).prctl(ranks.PR_SET_PDEATHSIG, signal.SIGTERM),
            )
            self.steps.append(step)
        assert step.stdin is not None
        with contextlib.suppress(BrokenPipeError), step.stdin:  # its end is noticed elsewhere
            step.stdin.write(json.dumps(hello).encode() + b"\n")


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


def listening() -> socket.socket:
    """A socket that other nodes can connect to."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _end_step(step: subprocess.Popen[bytes], patience: float) -> None:
    for end in (lambda: None, step.terminate, step.kill):
        end()
        try:
            step.wait(patience)
            return
        except subprocess.TimeoutExpired:
            patience = 10.0
