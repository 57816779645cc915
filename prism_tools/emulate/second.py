"""A further assistant: beside one node of sandbox ranks it has the values, so that payloads stay between these two.

It stands between the node's agent and the tool, whose assistant (emulate/assistant.py) decides when operations end, and
passes on what both say, but for payloads that nobody else needs. Started by capture/nodes.py, like an agent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import pickle
import select
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prism_tools.capture import ranks
from prism_tools.capture.agent import Agent, main
from prism_tools.capture.link import CONTROL, MAIN, Door, Link
from prism_tools.capture.node import Line
from prism_tools.capture.nodes import listening
from prism_tools.capture.server import Operation, Rank
from prism_tools.capture.wire import EMPTY
from prism_tools.emulate.contributions import Calls, Contribution, completion, ranks_of
from prism_tools.emulate.divergence import check_operation
from prism_tools.errors import PrismError

if TYPE_CHECKING:
    from prism_tools.emulate.values import Values
    from prism_tools.graph.match import Matches
    from prism_tools.graph.model import Graph
    from prism_tools.tensors.payload import PayloadReader


@dataclass
class Told:
    """A contribution of another node's rank."""

    descs: list[tuple[str, int]]
    has_input: bool
    payload: memoryview


class Second(Agent):
    """Its ranks are those of the agent behind it. ``playing``: by serial, while the tool's server is an assistant."""

    down: Link
    graph: Graph
    matches: Matches
    payloads: PayloadReader | None
    values: Values
    calls: Calls[Contribution]
    elsewhere: frozenset[int]  # the sandbox's ranks on other nodes

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.playing: dict[int, Rank] | None = None
        self.own_words: dict[str, Callable[..., None]] = {
            "load": self._load,
            "play": self._play,
            "contribution": self._contribution,
            "deliver": self._deliver,
            "unknown": self._unknown,
            "rest": self._rest,
        }

    def begin(self, start: dict[str, Any]) -> None:
        """Say where the agent is to come, import what is needed meanwhile, and let it in."""
        with listening() as listener:
            self.say("answer", (self.link.sock.getsockname()[0], listener.getsockname()[1]))
            ranks.limits()
            importlib.import_module("prism_tools.emulate.sandbox")  # and all that values need
            self.down = Link(self._admitted(listener, start["secret"]), self.full)
        self.selector.register(self.down.sock, selectors.EVENT_READ, self._pass_up)
        self.say("answer", None)

    def _admitted(self, listener: socket.socket, secret: str) -> socket.socket:
        with contextlib.closing(Door(listener, secret)) as door:
            while True:
                ready = select.select([self.link.sock, *door.sockets()], [], [])[0]
                if self.link.sock in ready:
                    self._obey()  # EOFError: the tool has ended; it says nothing before this
                for _, _, sock in door.admitted(ready):
                    return sock

    def _obey(self) -> None:
        for serial, channel, blob, payload in self.link.frames():
            if channel == CONTROL:
                kind, *values = pickle.loads(blob)
                if kind in self.own_words:
                    self.own_words[kind](payload, *values)
                    continue
                if kind == "spawn" and self.playing is not None:
                    number, spec = values
                    self.playing[number] = Rank(spec.rank, 0, Line(self.down, number, MAIN))
            self.down.send(serial, channel, blob, payload)

    def _pass_up(self) -> None:
        try:
            for serial, channel, blob, payload in self.down.frames():
                rank = (self.playing or {}).get(serial)
                if rank is not None and channel != CONTROL:
                    payload = self._kept(rank, blob, payload)
                self.link.send(serial, channel, blob, payload)
        except EOFError as error:
            raise PrismError(f"its agent is gone{f' ({error})' if str(error) else ''}") from error

    def _kept(self, rank: Rank, blob: memoryview, payload: memoryview) -> memoryview:
        """What the tool needs of a payload: all of it, or nothing where no rank of another node takes part."""
        message = pickle.loads(blob)
        if message[0] in ("group", "site"):
            self.handle(rank, rank.main, message, payload, [])
        if message[0] != "op":
            return payload
        operation = self._operation(rank, message, payload)
        try:
            check_operation(self.graph, rank.number, operation)
        except PrismError:  # for the tool to say
            return payload
        match = int(self.matches.of_node[int(self.matches.base[rank.number]) + operation.node])
        self.calls.add(match, rank.number, operation)
        return payload if self.elsewhere.intersection(ranks_of(self.matches, match)) else EMPTY

    # --- what the tool's assistant says to this one alone, each with its payload

    def _load(self, whole: memoryview) -> None:
        self.graph, self.matches, path = pickle.loads(whole)
        self.payloads = None
        if path is not None:
            from prism_tools.emulate.sandbox import open_payloads

            self.graph.payload = dataclasses.replace(self.graph.payload, path=path)
            self.payloads = open_payloads(self.graph, "-")

    def _play(self, _: memoryview, sandbox: list[int], mine: list[int]) -> None:
        from prism_tools.emulate.sandbox import prefetch
        from prism_tools.emulate.values import Values

        self.playing, self.groups = {}, {}
        self.elsewhere = frozenset(sandbox) - frozenset(mine)
        self.calls = Calls(self.matches, mine)
        self.values = Values(self.graph, self.matches, self.payloads)
        if self.payloads is not None:
            prefetch(self.graph, self.matches, self.payloads, sandbox, mine)
        gc.collect()
        gc.disable()  # a collection would make deliveries late
        self.say("answer", None)

    def _contribution(
        self, payload: memoryview, match: int, number: int, descs: list[tuple[str, int]], has_input: bool
    ) -> None:
        self.calls.add(match, number, Told(descs, has_input, payload))

    def _deliver(
        self, _: memoryview, serial: int, channel: int, match: int, number: int, ending: tuple[str, int, int]
    ) -> None:
        calls = self.calls.of(match)
        operation = calls[number]
        assert isinstance(operation, Operation)
        outs = [] if ending[0] else self.values.results(number, operation, calls)
        Line(self.down, serial, channel).send(*completion(operation, outs, ending))
        self.calls.answered(match)

    def _unknown(self, _: memoryview) -> None:
        self.say("answer", self.values.unknown)

    def _rest(self, _: memoryview) -> None:
        self.playing = None
        gc.enable()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tool's end is ours
    raise SystemExit(main(Second))
