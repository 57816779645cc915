"""The assistant: one process that answers the sandbox ranks for every absent rank, over sockets, in real time.

The sandbox's ranks are its children, or run on other nodes.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from prism_tools.capture import ranks, wire
from prism_tools.capture.clock import Clock
from prism_tools.capture.kv import EXPIRED
from prism_tools.capture.node import ANSWER, Line, Node
from prism_tools.capture.nodes import Nodes
from prism_tools.capture.server import Here, Operation, Rank, Server, process_state, refusal_of
from prism_tools.emulate.absent import AbsentChanges
from prism_tools.emulate.contributions import Calls, completion
from prism_tools.emulate.divergence import check_operation, check_trace
from prism_tools.emulate.planner import AtOnce, Timed
from prism_tools.emulate.values import Values
from prism_tools.errors import PrismError
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.tensors.payload import PayloadReader


class Assistant(Server):
    """Plays all ranks but ``sandbox``. ``planner`` says when crossing operations end, the payloads with which values."""

    def __init__(
        self,
        graph: Graph,
        matches: Matches,
        sandbox: list[int],
        planner: AtOnce | Timed,
        payloads: PayloadReader | None,
        nodes: Nodes | None = None,
    ) -> None:
        super().__init__(nodes)
        self.graph = graph
        self.sandbox = sandbox
        self.matches = matches
        self.planner = planner
        self.values = Values(graph, matches, payloads)
        self.further = [node for node in nodes.nodes if node.beside] if nodes is not None else []
        self.started = 0
        self._open: Calls[tuple[Operation, wire.Peer]] = Calls(matches, sandbox)
        self._told: dict[int, set[tuple[Here, int]]] = {}  # match → where the contribution of which other rank is known
        self._sent: set[tuple[int, int]] = set()  # (rank, opid) completed on the main socket
        self._leaving: list[wire.Peer] = []
        self.absent = AbsentChanges(graph.store, sandbox, self.store)

    def run(self, specs: list[ranks.Spec], tick: Callable[[], None] = lambda: None) -> dict[int, dict[str, Any]]:
        """Run the sandbox ranks to their end: their traces, with their machine's clock against that of
        the machine with the first rank. PrismError: divergence, or a failed rank."""
        self._share()
        for spec in specs:
            self.spawn(spec)
        # Until those on other nodes are forked: virtual ranks do not start before them.
        while not all(rank.pid for rank in self.ranks.values()):
            self.poll(None)
        self.started = time.monotonic_ns()
        self._decide(self.planner.start(self.started))
        for rank in self.ranks.values():
            rank.main.send(("go",))
        while self.running():
            if not self.poll(0.5) and self.store.waiting and self._all_asleep():
                self.absent.apply(everything=True)  # not the recorded order, but better than waiting for ever
                self.release()
            tick()
        for node in self.further:
            node.tell("unknown")
            self.values.unknown += node.answer(ANSWER)
        clocks = self.nodes.clocks() if self.nodes is not None else {}
        traces = {number: rank.trace for number, rank in self.ranks.items() if rank.trace is not None}
        for number, trace in traces.items():
            trace["clock"] = clocks.get(self.ranks[number].place, Clock())
        return traces

    def on_op(self, rank: Rank, peer: wire.Peer, operation: Operation) -> None:
        check_operation(self.graph, rank.number, operation)
        flat = int(self.matches.base[rank.number]) + operation.node
        match = int(self.matches.of_node[flat])
        self._open.add(match, rank.number, (operation, peer))
        self._decide(self.planner.arrived(rank.number, operation.node, operation.issued))

    def on_watch(self, rank: Rank, opid: int) -> None:
        """The completion may be on the main socket already, where nobody reads while C++ waits."""
        if (rank.number, opid) in self._sent and rank.push is not None:
            rank.push.send(("read",))

    def on_leave(self, rank: Rank, peer: wire.Peer) -> None:
        """A rank stays until all have left: others' real groups may still talk to it."""
        if rank.trace is not None and not rank.trace["status"]:
            check_trace(self.graph, rank.number, rank.trace)
        self._leaving.append(peer)
        if all(other.left or other.gone for other in self.ranks.values()) or (rank.trace or {}).get("status"):
            for waiting in self._leaving:
                waiting.send(("ok", None))

    def _all_asleep(self) -> bool:
        return all(rank.ask(process_state) == "S" for rank in self.ranks.values() if not rank.gone)

    def _store(self, rank: Rank, peer: wire.Peer, function: str, arguments: tuple) -> None:
        seen = len(self.store.log)
        super()._store(rank, peer, function, arguments)
        while seen < len(self.store.log):  # one more where a change lets somebody else's queue_pop go on
            number, made, key, _ = self.store.log[seen]
            seen += 1
            if made != EXPIRED:
                self.absent.made(number, made, key)
                self.release()

    def on_store_wait(self, rank: Rank, peer: wire.Peer) -> None:
        token, waiter = next((t, w) for t, w in reversed(self.store.waiting.items()) if w.rank == rank.number)
        if waiter.deadline is not None and self.absent.expires(rank.number, waiter.keys[0]):
            self.store.expire(token)
            peer.send(("ok", False))
            return
        if not self._nobody_runs():
            return
        self.absent.apply(everything=True)
        self.release()
        if self._nobody_runs():
            key = next(waiter.keys[0] for waiter in self.store.waiting.values() if waiter.rank == rank.number)
            raise PrismError(
                f"rank {rank.number} diverged: it waits for store key {key!r}, which nobody set in the recording"
            )

    def _nobody_runs(self) -> bool:
        waiting = {waiter.rank for waiter in self.store.waiting.values()}
        return all(other.number in waiting or other.left for other in self.ranks.values())

    def _decide(self, decisions: list[tuple[int, int, int]]) -> None:
        for number, node, when in decisions:
            match = int(self.matches.of_node[int(self.matches.base[number]) + node])
            calls = self._open.of(match)
            operation, peer = calls[number]
            rank = self.ranks[number]
            refused = refusal_of(operation)
            when = rank.place.clock.to_theirs(when)
            ending = refused, when, self.values.source(number, operation)
            target = peer
            if operation.opid in rank.watched and rank.push is not None:
                target = rank.push
            else:
                self._sent.add((number, operation.opid))
            if rank.place.beside:
                self._hand_over(rank, target, match, ending)
            else:
                live = {other: call for other, (call, _) in calls.items()}
                outs = [] if refused else self.values.results(number, operation, live)
                target.send(*completion(operation, outs, ending))
            if self._open.answered(match):
                self._told.pop(match, None)

    def _share(self) -> None:
        """Let further assistants know whom they serve, and wait until they are ready."""
        reader = self.values.payloads
        for node in self.further:
            if node.holds is not self.graph:
                node.holds = self.graph
                whole = self.graph, self.matches, None if reader is None else os.path.abspath(reader.path)
                node.tell("load", payload=memoryview(pickle.dumps(whole, 5)))
            assert self.nodes is not None
            node.tell("play", self.sandbox, self.nodes.shares(self.sandbox)[node])
        for node in self.further:
            node.answer(None)

    def _hand_over(self, rank: Rank, target: wire.Peer, match: int, ending: tuple[str, int, int]) -> None:
        """Let the assistant of the rank's node deliver, once it has what ranks of other nodes contribute."""
        node = rank.place
        assert isinstance(node, Node) and isinstance(target, Line)
        told = self._told.setdefault(match, set())
        for other, (call, _) in self._open.of(match).items():
            if self.ranks[other].place is not node and (node, other) not in told:
                told.add((node, other))
                node.tell("contribution", match, other, call.descs, call.has_input, payload=call.payload)
        node.tell("deliver", target.serial, target.channel, match, rank.number, ending)
