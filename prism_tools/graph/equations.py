"""The max-plus equations of a graph: what every arrival, release and end is the maximum of, and after which delay.

This is the one place that turns the semantics of nodes and matches into arithmetic; the solver evaluates it with
integers, the condensation with symbols. Variables are numbered: the end of flat node n is ``n``, the arrival of
communication node n is ``total + n``, and releases (a set of members' arrivals has gathered and the match's duration
has passed) follow from ``2 * total``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.model import Durations, Graph

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
    own = flat(durations.own, durations.row).tolist()
    tail = flat(durations.tail, durations.row).tolist()
    of_node = matches.of_node.tolist()
    offset, data = order.preds.offset.tolist(), order.preds.data.tolist()
    for step in order.steps:
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
