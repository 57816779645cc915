"""When an emulated operation ends: at once (slices), or when the calibrated graph says so (replay)."""

from __future__ import annotations

import random

from prism_tools.emulate.condense import Condensed
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.releases import releases

Decision = tuple[int, int, int]  # rank, node, time (ns on the leader's clock)


class AtOnce:
    """Virtual peers have always arrived already and the transfer takes no time; with ``delay_ns`` they are late by a random
    time between half of that and that (the invariance test). Each match draws its delay from ``seed``."""

    def __init__(self, graph: Graph, matches: Matches, sandbox: set[int], delay_ns: int = 0, seed: int = 0) -> None:
        self._graph = graph
        self._matches = matches
        self._sandbox = sandbox
        self._delay_ns = delay_ns
        self._seed = seed
        self._arrivals: dict[int, int] = {}  # flat node → time
        self._waiting: dict[int, list[tuple[list[int], list[int]]]] = {}  # match → live arrivals, live leavers

    def start(self, now: int) -> list[Decision]:
        """The replay begins at ``now``."""
        return []

    def arrived(self, rank: int, node: int, when: int) -> list[Decision]:
        """A sandbox rank has issued an operation that crosses: what can be decided now."""
        flat = int(self._matches.base[rank]) + node
        match = int(self._matches.of_node[flat])
        self._arrivals[flat] = when
        if match not in self._waiting:
            self._waiting[match] = [
                (self._live(needed), self._live(leavers))
                for needed, leavers in releases(self._graph, self._matches, match)
            ]
        decisions: list[Decision] = []
        rest = []
        for needed, leavers in self._waiting[match]:
            if all(member in self._arrivals for member in needed):
                end = max(self._arrivals[member] for member in needed) + self._delay(match) if needed else when
                decisions += [(self._matches.rank_of(m), self._matches.node_of(m), end) for m in leavers]
            else:
                rest.append((needed, leavers))
        self._waiting[match] = rest
        return decisions

    def _live(self, members: list[int]) -> list[int]:
        return [member for member in members if self._matches.rank_of(member) in self._sandbox]

    def _delay(self, match: int) -> int:
        if not self._delay_ns:
            return 0
        return random.Random(self._seed * 1_000_003 + match).randint(self._delay_ns // 2, self._delay_ns)


class Timed:
    """The condensed graph, evaluated as the sandbox goes: T = max(live arrivals, virtual arrivals) + d + tail (design §8).

    Cost per event does not depend on W. Virtual ranks start when the sandbox does.
    """

    def __init__(self, condensed: Condensed) -> None:
        vertices = condensed.vertices
        self._vertices = vertices
        self._zero = 0
        self._ends: dict[int, int] = {}
        self._arrivals: dict[tuple[int, int], int] = {}
        self._missing = [len(vertex.preds) + len(vertex.live) for vertex in vertices]
        self._after: list[list[int]] = [[] for _ in vertices]
        self._on_arrival: dict[tuple[int, int], list[int]] = {}
        self._outputs: list[list[tuple[int, int, int]]] = [[] for _ in vertices]
        for number, vertex in enumerate(vertices):
            for pred, _ in vertex.preds:
                self._after[pred].append(number)
            for place in vertex.live:
                self._on_arrival.setdefault(place, []).append(number)
        for (rank, node), (number, tail) in condensed.output.items():
            self._outputs[number].append((rank, node, tail))

    def start(self, now: int) -> list[Decision]:
        """The replay begins at ``now``: what depends on virtual ranks alone is known."""
        self._zero = now
        known = [number for number, missing in enumerate(self._missing) if not missing]
        return self._settle(known)

    def arrived(self, rank: int, node: int, when: int) -> list[Decision]:
        """A sandbox rank has issued an operation that crosses: what can be decided now."""
        self._arrivals[rank, node] = when - self._zero
        known = []
        for number in self._on_arrival.get((rank, node), ()):
            self._missing[number] -= 1
            if not self._missing[number]:
                known.append(number)
        return self._settle(known)

    def _settle(self, known: list[int]) -> list[Decision]:
        decisions: list[Decision] = []
        while known:
            number = known.pop()
            end = self._ends[number] = self._vertices[number].end(self._ends, self._arrivals)
            decisions += [(rank, node, self._zero + end + tail) for rank, node, tail in self._outputs[number]]
            for after in self._after[number]:
                self._missing[after] -= 1
                if not self._missing[after]:
                    known.append(after)
        return decisions
