"""The max-plus equations of a graph: what every arrival, release and end is the maximum of, and after which delay.

This is the one place that turns the semantics of nodes and matches into arithmetic; the solver evaluates it with
integers, the condensation with symbols. Variables are numbered: the end of flat node n is ``n``, the arrival of
communication node n is ``total + n``, and releases (a set of members' arrivals has gathered and the match's duration
has passed) follow from ``2 * total``.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.model import Durations, Graph, Ragged
from prism_tools.graph.releases import eager_pairs, joined, rows_of

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order

Equation = tuple[int, Sequence[int], int]  # value[target] = max(value[source] for sources, or 0) + delay


def flat(rows: list[np.ndarray], row: np.ndarray) -> np.ndarray:
    """The arrays of all ranks one after the other, indexed as ``Matches.base`` is; ``row[r]`` names rank r's array."""
    return np.concatenate([rows[k] for k in row]) if len(row) else np.empty(0, np.int64)


def equations(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Iterator[Equation]:
    """Every equation once, after the equations of all its sources."""
    total = int(matches.base[-1])
    row = durations.row[matches.classes.lowest]
    own, tail = flat(durations.own, row).tolist(), flat(durations.tail, row).tolist()
    of_node = matches.of_node.tolist()
    offset, data = order.preds.offset.tolist(), order.preds.data.tolist()
    for step in order.steps.tolist():
        if step >= 0:
            preds = data[offset[step] : offset[step + 1]]
            if of_node[step] >= 0:
                yield total + step, preds, 0
            else:
                yield step, preds, own[step]
            continue
        arrivals, leavers = order.releases[-step - 1]
        release = 2 * total - step - 1
        yield release, [total + member for member in arrivals], own[leavers[0]]
        for member in leavers:
            yield member, (release,), tail[member]


@dataclass
class System:
    """Equations as arrays, each after those of its sources: value[variable[k]] = max(value[sources[k]], or 0) + delay[k]."""

    variable: np.ndarray
    sources: Ragged
    delay: np.ndarray


def system_of(matches: Matches, order: Order, durations: Durations, steps: np.ndarray) -> System:
    """What ``equations`` yields, of these ``steps`` of the order (ascending places in it)."""
    total = int(matches.base[-1])
    row = durations.row[matches.classes.lowest]
    own, tail = flat(durations.own, row), flat(durations.tail, row)
    gates, nodes, opened = order.releases, steps[steps >= 0], -steps[steps < 0] - 1
    left = rows_of(gates.leavers, opened)
    many = np.diff(left.offset)
    size = np.ones(len(steps), np.int64)
    size[steps < 0] += many
    first = np.cumsum(size) - size  # where each step's variables begin
    of_node, of_gate = first[steps >= 0], first[steps < 0]
    of_leaver = np.ones(int(size.sum()), bool)
    of_leaver[first] = False
    matched = matches.of_node[nodes] >= 0
    variable, delay = np.empty(len(of_leaver), np.int64), np.empty(len(of_leaver), np.int64)
    variable[of_node], delay[of_node] = nodes + np.where(matched, total, 0), np.where(matched, 0, own[nodes])
    variable[of_gate], delay[of_gate] = 2 * total + opened, own[left.data[left.offset[:-1]]]
    variable[of_leaver], delay[of_leaver] = left.data, tail[left.data]
    arrivals = rows_of(gates.arrivals, opened)
    arrivals.data += total
    released = Ragged(np.arange(len(left.data) + 1), np.repeat(variable[of_gate], many))
    parts = [rows_of(order.preds, nodes), arrivals, released]
    back = np.argsort(np.concatenate([of_node, of_gate, np.flatnonzero(of_leaver)]), kind="stable")
    return System(variable, rows_of(joined(parts), back), delay)


class Binding:
    """``binding[variable]``: the source that was latest (the first of them; -1: none, ready at 0), found when asked for;
    ``end``, ``arrival``: the values of ends and arrivals (int64, by flat node). Here releases have their matches' numbers, and
    then those of ``order.apart``; who sends eagerly is in none."""

    def __init__(self, order: Order, end: np.ndarray, arrival: np.ndarray) -> None:
        self._order, self._end, self._arrival = order, end, arrival
        self._eager, self._base = eager_pairs(order.matches), order.base.tolist()

    def __getitem__(self, variable: int) -> int:
        total, order, matches = len(self._end), self._order, self._order.matches
        if variable >= 2 * total:
            release = variable - 2 * total
            met = release < len(matches)
            arrivals = matches.members[release] if met else order.apart.coming[release - len(matches)]
            return total + int(arrivals[self._arrival[arrivals].argmax()])
        if variable < total and (match := int(matches.of_node[variable])) >= 0:
            if (apart := order.layout.apart(variable)) >= 0:
                return 2 * total + len(matches) + apart
            return (
                total + variable if self._eager[match] and matches.members[match][0] == variable else 2 * total + match
            )
        node = variable % total
        rank = bisect(self._base, node) - 1
        begin = self._base[rank]
        sources = order.programs.before[order.programs.first[rank] + node - begin]
        if len(sources) > 1:
            return begin + int(sources[self._end[begin + sources].argmax()])
        return begin + int(sources[0]) if len(sources) else -1
