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
from prism_tools.graph.schema import Match

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order

Equation = tuple[int, Sequence[int], int]  # value[target] = max(value[source] for sources, or 0) + delay

_ROOT_LAST = int(Match.ROOT_LAST)  # plain numbers: these are asked for once a match, and enum members are slow to reach
_ROOTED = (int(Match.ROOT_FIRST), _ROOT_LAST)
_EARLY = (*_ROOTED, int(Match.EAGER))


def releases(graph: Graph, matches: Matches, match: int) -> list[tuple[list[int], list[int]]]:
    """Who waits for whom in ``match``: (arrivals, leavers), flat nodes; the leavers go once all these have arrived."""
    members = matches.members[match].tolist()
    kind = int(matches.kind[match])
    if kind not in _EARLY:
        return [(members, members)]
    early = root_of(graph, matches, match) if kind in _ROOTED else members[:1]
    if not early:
        return [(members, members)]
    others = [member for member in members if member not in early]
    if kind == _ROOT_LAST:
        return [([other], [other]) for other in others] + [(members, early)]
    return [(early, early)] + [(early + [other], [other]) for other in others]


def root_of(graph: Graph, matches: Matches, match: int) -> list[int]:
    """The root's flat node in a rooted ``match``; empty if it has none."""
    if int(matches.kind[match]) not in _ROOTED:
        return []
    members = matches.members[match].tolist()
    place = int(graph.program_of(matches.rank_of(members[0])).root[matches.node_of(members[0])])
    rank = int(graph.groups.members[int(matches.group[match])][place])
    return [member for member in members if matches.rank_of(member) == rank]


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
    release = 2 * total
    for step in order.steps:
        if step >= 0:
            preds = data[offset[step] : offset[step + 1]]
            if of_node[step] >= 0:
                yield total + step, preds, 0
            else:
                yield step, preds, own[step]
            continue
        for arrivals, leavers in releases(graph, matches, -step - 1):
            yield release, [total + member for member in arrivals], own[leavers[0]]
            for member in leavers:
                yield member, (release,), tail[member]
            release += 1
