"""An order in which all nodes and matches can be evaluated, each after what it depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.compiled import Kernel
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph, Program, Ragged
from prism_tools.graph.names import node_text
from prism_tools.graph.releases import Releases, all_releases, joined
from prism_tools.graph.schema import Kind
from prism_tools.graph.semantics import is_queue

SHOWN = 20  # stuck ranks spelt out in an error


@dataclass
class Programs:
    """What the nodes of each program wait for within it. Laid-out rank k has nodes ``first[k]`` on of ``before``:
    int64 rows of places in the program (the one before it in its queue lane, then edge sources), and of ``after``: the
    reverse."""

    first: np.ndarray
    before: Ragged
    after: Ragged


@dataclass
class Order:
    """``steps``: int64; s >= 0: flat node s, all of whose predecessors have ended (a COMM node arrives now, and ends
    later); s < 0: release -(s + 1), all of whose arrivals have come (its leavers end now).

    ``releases``: those of all matches (graph/releases.py), by number. ``owner``: int32, laid-out rank of a flat node.
    """

    steps: np.ndarray
    releases: Releases
    programs: Programs
    base: np.ndarray
    owner: np.ndarray

    @cached_property
    def preds(self) -> Ragged:
        """int64, row n: flat predecessors of flat node n."""
        before = self.programs.before
        place = np.arange(len(self.owner)) + (self.programs.first - self.base[:-1])[self.owner]
        size = np.diff(before.offset)[place]
        offset = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        at = np.arange(offset[-1]) + np.repeat(before.offset[:-1][place] - offset[:-1], size)
        return Ragged(offset, before.data[at] + np.repeat(self.base[:-1][self.owner], size))


def dependency_order(graph: Graph, matches: Matches) -> Order:
    """Order all nodes and matches; the same graph always gives the same order.

    PrismError names rank, operation and call site of the nodes that wait for each other, if there is no order.
    """
    base, total = matches.base, int(matches.base[-1])
    gates = all_releases(graph, matches)
    chosen = graph.ranks.program[matches.classes.lowest]
    owner = np.repeat(np.arange(len(chosen), dtype=np.int32), np.diff(base))
    programs = _programs(graph, chosen)
    opens = reverse(gates.arrivals, total)
    steps = np.empty(total + len(gates), np.int64)
    count = _in_order(
        total, base, owner, programs.first, *_arrays(programs.before), *_arrays(programs.after), matches.of_node,
        *_arrays(opens), np.diff(gates.arrivals.offset), *_arrays(gates.leavers), steps,
    )  # fmt: skip
    order = Order(steps[:count], gates, programs, base, owner)
    if count < len(steps):
        raise _stuck(graph, matches, order)
    return order


def _arrays(ragged: Ragged) -> tuple[np.ndarray, np.ndarray]:
    return ragged.offset, ragged.data


@Kernel
def _in_order(
    base, owner, first, before_at, before, after_at, after, of_node, opens_at, opens, absent, leave_at, leave, steps
):  # fmt: skip
    """Fill in ``steps``; returns how many there are."""
    total = len(owner)
    missing = np.empty(total, np.int32)
    ready = np.empty(total, np.int64)
    ended = np.empty(1 + len(leave), np.int64)
    top = count = 0
    for node in range(total - 1, -1, -1):
        place = first[owner[node]] + node - base[owner[node]]
        missing[node] = before_at[place + 1] - before_at[place]
        if not missing[node]:
            ready[top] = node
            top += 1
    while top:
        top -= 1
        node = ready[top]
        steps[count] = node
        count += 1
        leaving = 0
        if of_node[node] < 0:
            ended[0] = node
            leaving = 1
        for at in range(opens_at[node], opens_at[node + 1]):
            gate = opens[at]
            absent[gate] -= 1
            if not absent[gate]:
                steps[count] = -gate - 1
                count += 1
                for leaver in range(leave_at[gate], leave_at[gate + 1]):
                    ended[leaving] = leave[leaver]
                    leaving += 1
        for k in range(leaving):
            start = base[owner[ended[k]]]
            place = first[owner[ended[k]]] + ended[k] - start
            for at in range(after_at[place], after_at[place + 1]):
                follower = start + after[at]
                missing[follower] -= 1
                if not missing[follower]:
                    ready[top] = follower
                    top += 1
    return count


def _programs(graph: Graph, chosen: np.ndarray) -> Programs:
    before = [_local_predecessors(program, graph.lanes) for program in graph.programs]
    after = [reverse(rows, len(rows)) for rows in before]
    first = np.concatenate([[0], np.cumsum([len(rows) for rows in before])]).astype(np.int64)
    return Programs(first[chosen], joined(before), joined(after))


def reverse(rows: Ragged, count: int) -> Ragged:
    """Row n, of ``count``: the rows that have n, ascending."""
    owner = np.repeat(np.arange(len(rows)), np.diff(rows.offset))
    offset = np.concatenate([[0], np.cumsum(np.bincount(rows.data, minlength=count))]).astype(np.int64)
    return Ragged(offset, owner[np.argsort(rows.data, kind="stable")])


def predecessors(program: Program, lanes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(source, target), int64: what each node of ``program`` waits for, in its queue lanes and by its edges."""
    pairs = [program.edges.astype(np.int64).reshape(-1, 2)]
    for lane, name in enumerate(lanes):
        if is_queue(name):
            pairs.insert(0, _lane_pairs(program, np.flatnonzero(program.lane == lane)))
    source, target = np.concatenate(pairs).T
    return source, target


def _local_predecessors(program: Program, lanes: list[str]) -> Ragged:
    source, target = predecessors(program, lanes)
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


def _stuck(graph: Graph, matches: Matches, order: Order) -> PrismError:
    """What each rank waits in: those that wait in a circle, then who waits for them."""
    arrived, gone = np.zeros(len(order.owner), bool), np.zeros(len(order.releases), bool)
    arrived[order.steps[order.steps >= 0]] = True
    gone[-order.steps[order.steps < 0] - 1] = True
    gate = np.full(len(order.owner), -1, np.int64)
    leavers = order.releases.leavers
    gate[leavers.data] = np.repeat(np.arange(len(leavers)), np.diff(leavers.offset))
    held = arrived & (gate >= 0) & ~gone[gate]
    ended = arrived & ~held
    circle = _circle(order, arrived, ended, gate, int(np.argmin(ended)))
    shown = [flat for flat in circle if held[flat]] or circle  # no communication is to blame for edges in a circle
    shown += sorted(set(np.flatnonzero(held).tolist()).difference(shown))
    lines = []
    for flat in shown[:SHOWN]:
        absent = [m for m in order.releases.arrivals[gate[flat]].tolist() if not arrived[m]] if held[flat] else []
        text = node_text(graph, matches.rank_of(flat), matches.node_of(flat))
        lines.append(text + (f" waits for rank {matches.rank_of(absent[0])}" if absent else ""))
    more = f" (and {len(shown) - 2} more)" if len(shown) > 2 else ""
    return PrismError(
        f"operations wait for each other: {'; '.join(lines[:2])}{more}; the program cannot have run in this order, "
        "see prism-inspect check",
        detail="\n".join(lines[2:]),
    )


def _circle(order: Order, arrived: np.ndarray, ended: np.ndarray, gate: np.ndarray, node: int) -> list[int]:
    """Flat nodes, from the lowest on, each of which waits for the next and the last for the first; ``node``, which has not
    ended, waits for one of them. ``gate``: the release that lets a node go."""
    place: dict[int, int] = {}
    while node not in place:
        place[node] = len(place)
        sources, done = (order.releases.arrivals[gate[node]], arrived) if arrived[node] else (order.preds[node], ended)
        node = int(sources[~done[sources]][0])
    circle = list(place)[place[node] :]
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]
