"""The condensed graph of a replay: when virtual ranks act, as a max-plus function of what sandbox ranks do.

Symbols are the vertices themselves, so a virtual rank's time is a short list of (vertex, delay): after a match that
faces the sandbox it is that match's vertex alone. Lists longer than a cap become auxiliary vertices. Nothing is pruned
for being unlikely to matter, so the condensed graph gives the full graph's times exactly, whatever the sandbox does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.equations import equations
from prism_tools.graph.model import Durations, Graph

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


@dataclass
class Vertex:
    """A point in time that sandbox ranks can feel; its end is known once its ``preds`` have ended and ``live`` arrived.

    ``preds``: (vertex, ns after its end); ``live``: (rank, node) of sandbox arrivals; ``constant``: ns, what virtual
    ranks alone determine, or None; ``delay``: the match's duration, ns. Auxiliary vertices have no ``live``.
    """

    preds: list[tuple[int, int]]
    live: list[tuple[int, int]]
    constant: int | None
    delay: int

    def end(self, ends: Sequence[int] | Mapping[int, int], arrivals: Mapping[tuple[int, int], int]) -> int:
        """When the vertex ends, ns: ``ends`` of earlier vertices by number, ``arrivals`` of sandbox nodes."""
        times = [ends[pred] + after for pred, after in self.preds] + [arrivals[node] for node in self.live]
        return max(times if self.constant is None else [*times, self.constant]) + self.delay


@dataclass
class Condensed:
    """``vertices`` in dependency order; ``output[(rank, node)] = (vertex, tail)``: when that node ends.

    Times count from the start of the replay, when every virtual rank starts too.
    """

    vertices: list[Vertex] = field(default_factory=list)
    output: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class _Form:
    """max(constant, vertex end + delay for its terms); shared, never changed."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: int | None, terms: dict[int, int]) -> None:
        self.constant = constant
        self.terms = terms


_Time = tuple[_Form, int]  # a form, and ns after it


def condense(
    graph: Graph, matches: Matches, order: Order, durations: Durations, sandbox: set[int], cap: int = 4
) -> Condensed:
    """Condense ``graph`` for a replay in which the ranks ``sandbox`` run for real.

    Their own spans are not modelled: their arrivals come live. Matches of groups wholly inside the sandbox do not appear.
    """
    builder = _Builder(graph, matches, sandbox, cap)
    for target, sources, delay in equations(graph, matches, order, durations):
        builder.add(target, sources, delay)
    return _used(builder.condensed)


class _Builder:
    def __init__(self, graph: Graph, matches: Matches, sandbox: set[int], cap: int) -> None:
        self.condensed = Condensed()
        self._matches = matches
        self._cap = cap
        self._total = int(matches.base[-1])
        live = np.repeat([rank in sandbox for rank in range(graph.world_size)], np.diff(matches.base))
        self._live: list[bool] = live.tolist()
        # Two sandbox ranks that talk within a larger group are played too: only whole groups have a real backend.
        played = np.array([not sandbox.issuperset(members.tolist()) for members in graph.groups.members], bool)
        self._crosses: list[bool] = played[matches.group].tolist()
        self._time: dict[int, _Time] = {}
        self._vertex: dict[int, int] = {}  # of a release that sandbox members take part in

    def add(self, target: int, sources: Sequence[int], delay: int) -> None:
        """Take in one equation."""
        if target >= 2 * self._total:
            self._release(target, sources, delay)
        elif not self._live[target % self._total]:
            self._time[target] = self._join(sources, delay)
        elif target < self._total and sources and sources[0] in self._vertex:
            self.condensed.output[self._place(target)] = (self._vertex[sources[0]], delay)

    def _release(self, target: int, sources: Sequence[int], delay: int) -> None:
        live = [source - self._total for source in sources if self._live[source - self._total]]
        virtual = [source for source in sources if not self._live[source - self._total]]
        if not live:
            self._time[target] = self._join(virtual, delay)
        elif self._crosses[self._matches.of_node[live[0]]]:
            form, after = self._join(virtual, 0) if virtual else (_Form(None, {}), 0)
            vertex = self._new_vertex(form, after, [self._place(node) for node in live], delay)
            self._vertex[target] = vertex
            self._time[target] = (_Form(None, {vertex: 0}), 0)

    def _join(self, sources: Sequence[int], delay: int) -> _Time:
        """The latest of ``sources``, ``delay`` later; 0 if there are none."""
        if len(sources) == 1:
            form, after = self._time[sources[0]]
            return form, after + delay
        latest: dict[_Form, int] = {}
        for source in sources:
            form, after = self._time[source]
            latest[form] = max(after, latest.get(form, after))
        if len(latest) == 1:
            form, after = latest.popitem()
            return form, after + delay
        terms: dict[int, int] = {}
        for form, after in latest.items():
            for vertex, ns in form.terms.items():
                terms[vertex] = max(ns + after, terms.get(vertex, ns + after))
        constants = [form.constant + after for form, after in latest.items() if form.constant is not None]
        merged = _Form(max(constants, default=None if latest else 0), terms)
        if len(terms) > self._cap:
            merged = _Form(None, {self._new_vertex(merged, 0, [], 0): 0})
        return merged, delay

    def _new_vertex(self, form: _Form, after: int, live: list[tuple[int, int]], delay: int) -> int:
        preds = sorted((vertex, ns + after) for vertex, ns in form.terms.items())
        constant = None if form.constant is None else form.constant + after
        self.condensed.vertices.append(Vertex(preds, live, constant, delay))
        return len(self.condensed.vertices) - 1

    def _place(self, node: int) -> tuple[int, int]:
        return self._matches.rank_of(node), self._matches.node_of(node)


def _used(condensed: Condensed) -> Condensed:
    """Without the vertices that no output depends on."""
    used = [False] * len(condensed.vertices)
    for vertex, _ in condensed.output.values():
        used[vertex] = True
    for vertex in range(len(used) - 1, -1, -1):
        if used[vertex]:
            for pred, _ in condensed.vertices[vertex].preds:
                used[pred] = True
    number = (np.cumsum(used) - 1).tolist()
    kept = [vertex for vertex, keep in zip(condensed.vertices, used, strict=True) if keep]
    for vertex_kept in kept:
        vertex_kept.preds = [(number[pred], after) for pred, after in vertex_kept.preds]
    return Condensed(kept, {node: (number[vertex], tail) for node, (vertex, tail) in condensed.output.items()})
