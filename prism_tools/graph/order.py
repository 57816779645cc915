"""An order in which all nodes and matches can be evaluated, each after what it depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph, Program, Ragged
from prism_tools.graph.names import node_text
from prism_tools.graph.releases import Release, releases
from prism_tools.graph.schema import Kind
from prism_tools.graph.semantics import is_queue

SHOWN = 20  # stuck ranks spelt out in an error


@dataclass
class Order:
    """``steps``: s >= 0: flat node s, all of whose predecessors have ended (a COMM node arrives now, and ends later);
    s < 0: release -(s + 1), all of whose arrivals have come (its leavers end now).

    ``releases``: those of all matches (graph/releases.py), by number.
    ``preds``: int64, row n: flat predecessors of flat node n: the one before it in its queue lane, then edge sources.
    """

    steps: list[int]
    preds: Ragged
    releases: list[Release]


def dependency_order(graph: Graph, matches: Matches) -> Order:
    """Order all nodes and matches; the same graph always gives the same order.

    PrismError names rank, operation and call site of the nodes that wait for each other, if there is no order.
    """
    preds = _predecessors(graph, matches.base)
    total = len(preds)
    missing = np.diff(preds.offset).tolist()
    followers = _followers(preds)
    offset, data = followers.offset.tolist(), followers.data.tolist()
    gates = [release for match in range(len(matches)) for release in releases(graph, matches, match)]
    absent = [len(arrivals) for arrivals, _ in gates]
    opens: dict[int, list[int]] = {}
    for gate, (arrivals, _) in enumerate(gates):
        for member in arrivals:
            opens.setdefault(member, []).append(gate)
    communicates = (matches.of_node >= 0).tolist()
    steps: list[int] = []
    ready = [n for n in range(total - 1, -1, -1) if not missing[n]]
    while ready:
        node = ready.pop()
        steps.append(node)
        ended = [] if communicates[node] else [node]
        for gate in opens.get(node, ()):
            absent[gate] -= 1
            if not absent[gate]:
                steps.append(-gate - 1)
                ended += gates[gate][1]
        for source in ended:
            for follower in data[offset[source] : offset[source + 1]]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
    if len(steps) < total + len(gates):
        raise _stuck(graph, matches, preds, steps, gates)
    return Order(steps, preds, gates)


def _predecessors(graph: Graph, base: np.ndarray) -> Ragged:
    """Row n: lane predecessor and edge sources of flat node n, as flat indices."""
    local = [_local_predecessors(program, graph.lanes) for program in graph.programs]
    counts = [np.diff(rows.offset) for rows in local]
    chosen = graph.ranks.program
    offset = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *(counts[p] for p in chosen)]))])
    data = [local[p].data + start for p, start in zip(chosen, base[:-1], strict=True)]
    return Ragged(offset.astype(np.int64), np.concatenate([np.empty(0, np.int64), *data]))


def _local_predecessors(program: Program, lanes: list[str]) -> Ragged:
    pairs = [program.edges.astype(np.int64).reshape(-1, 2)]
    for lane, name in enumerate(lanes):
        if is_queue(name):
            pairs.insert(0, _lane_pairs(program, np.flatnonzero(program.lane == lane)))
    source, target = np.concatenate(pairs).T
    order = np.argsort(target, kind="stable")
    offset = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=len(program)))])
    return Ragged(offset.astype(np.int64), source[order])


def _lane_pairs(program: Program, nodes: np.ndarray) -> np.ndarray:
    """int64[n, 2] (earlier, later) of the ``nodes`` of a queue. The operations of one batch run together: each follows
    what was before the batch, and what comes next follows all of them."""
    batch = np.where(program.kind[nodes] == Kind.COMM, program.batch[nodes], -1)
    joined = (batch[1:] == batch[:-1]) & (batch[1:] >= 0)
    if not joined.any():
        return np.stack([nodes[:-1], nodes[1:]], 1).astype(np.int64)
    first = np.flatnonzero(np.append(True, ~joined))
    units = np.split(nodes, first[1:])
    pairs = [(a, b) for before, after in zip(units, units[1:], strict=False) for b in after for a in before]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _followers(preds: Ragged) -> Ragged:
    """The reverse of ``preds``: row n lists the nodes that wait for n."""
    counts = np.bincount(preds.data, minlength=len(preds))
    owner = np.repeat(np.arange(len(preds)), np.diff(preds.offset))
    offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Ragged(offset, owner[np.argsort(preds.data, kind="stable")])


def _stuck(graph: Graph, matches: Matches, preds: Ragged, steps: list[int], gates: list[Release]) -> PrismError:
    """What each rank waits in: the nodes that have arrived in a match whose other members have not."""
    arrived = np.zeros(len(preds), bool)
    done = np.array(steps, np.int64)
    arrived[done[done >= 0]] = True
    held = arrived & (matches.of_node >= 0)
    for step in steps:
        if step < 0:
            held[gates[-step - 1][1]] = False
    waiting = np.flatnonzero(held)
    if not len(waiting):  # no communication is to blame: edges of one rank run in a circle
        waiting = np.flatnonzero(~arrived)
    lines = []
    for flat in waiting[:SHOWN].tolist():
        match = int(matches.of_node[flat])
        absent = [int(m) for m in matches.members[match] if not arrived[m]] if match >= 0 else []
        text = node_text(graph, matches.rank_of(flat), matches.node_of(flat))
        lines.append(text + (f" waits for rank {matches.rank_of(absent[0])}" if absent else ""))
    more = f" (and {len(waiting) - 2} more)" if len(waiting) > 2 else ""
    return PrismError(
        f"operations wait for each other: {'; '.join(lines[:2])}{more}; the program cannot have run in this order, "
        "see prism-inspect check",
        detail="\n".join(lines[2:]),
    )
