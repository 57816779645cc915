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
from prism_tools.graph.releases import Apart, Releases, all_releases, apart_of, joined, reverse, rows_of
from prism_tools.graph.schema import Kind
from prism_tools.graph.semantics import is_queue
from prism_tools.graph.worklist import Layout, layout_of

SHOWN = 20  # stuck ranks spelt out in an error


@dataclass
class Programs:
    """What the nodes of each program wait for within it. Laid-out rank k has nodes ``first[k]`` on of ``before``:
    int64 rows of places in the program (the one before it in its queue lane, then edge sources), each once; of ``after``:
    the reverse; and of ``follows``: int8, 1 where only the next node waits for one, and for nothing else."""

    first: np.ndarray
    before: Ragged
    after: Ragged
    follows: np.ndarray

    def heads(self, base: np.ndarray) -> np.ndarray:
        """int64: the flat nodes that wait for nothing within their programs, ascending."""
        free = np.flatnonzero(np.diff(self.before.offset) == 0)
        low, high = np.searchsorted(free, self.first), np.searchsorted(free, self.first + np.diff(base))
        many = high - low
        at = np.arange(many.sum()) + np.repeat(low - (np.cumsum(many) - many), many)
        return free[at] + np.repeat(base[:-1] - self.first, many)


@dataclass
class Order:
    """What all nodes wait for; and from it, found when first asked for, an order in which they can be evaluated.

    ``apart``: the releases of matches with a root.
    """

    graph: Graph
    matches: Matches
    apart: Apart
    programs: Programs

    @property
    def base(self) -> np.ndarray:
        return self.matches.base

    @cached_property
    def owner(self) -> np.ndarray:
        """int32: laid-out rank of each flat node."""
        return np.repeat(np.arange(len(self.base) - 1, dtype=np.int32), np.diff(self.base))

    @cached_property
    def preds(self) -> Ragged:
        """int64, row n: flat predecessors of flat node n."""
        place = np.arange(len(self.owner)) + (self.programs.first - self.base[:-1])[self.owner]
        rows = rows_of(self.programs.before, place)
        rows.data += np.repeat(self.base[:-1][self.owner], np.diff(rows.offset))
        return rows

    @cached_property
    def releases(self) -> Releases:
        """Those of all matches (graph/releases.py), by number."""
        return all_releases(self.matches, self.apart)

    @cached_property
    def layout(self) -> Layout:
        """What the worklist goes through (graph/worklist.py)."""
        return layout_of(self)

    @cached_property
    def steps(self) -> np.ndarray:
        """int64; s >= 0: flat node s, all of whose predecessors have ended (a COMM node arrives now, and ends later);
        s < 0: release -(s + 1), all of whose arrivals have come (its leavers end now). The same graph always gives the
        same. PrismError names rank, operation and call site of the nodes that wait for each other, if there is no order.
        """
        total, programs, gates = int(self.base[-1]), self.programs, self.releases
        opens = reverse(gates.arrivals, total)
        steps = np.empty(total + len(gates), np.int64)
        count = _in_order(
            total, self.base, self.owner, programs.first, *_arrays(programs.before), *_arrays(programs.after),
            self.matches.of_node, *_arrays(opens), np.diff(gates.arrivals.offset), *_arrays(gates.leavers), steps,
        )  # fmt: skip
        if count < len(steps):
            raise _stuck(self, steps[:count])
        return steps


def dependencies(graph: Graph, matches: Matches) -> Order:
    """What all nodes wait for; whether there is an order shows when it is asked for, or the equations are solved."""
    chosen = graph.ranks.program[matches.classes.lowest]
    return Order(graph, matches, apart_of(graph, matches), _programs(graph, chosen))


def dependency_order(graph: Graph, matches: Matches) -> Order:
    """As ``dependencies``, after a look whether there is an order: PrismError as of ``Order.steps``."""
    order = dependencies(graph, matches)
    _ = order.steps
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
    follows = [
        np.append(_is_only(b, -1)[1:], False)[: len(b)] & _is_only(a, 1) for a, b in zip(after, before, strict=True)
    ]
    return Programs(first[chosen], joined(before), joined(after), np.concatenate(follows).astype(np.int8))


def _is_only(rows: Ragged, step: int) -> np.ndarray:
    """bool: whether row n is n + ``step`` and nothing else."""
    found = np.diff(rows.offset) == 1
    here = np.flatnonzero(found)
    found[here] = rows.data[rows.offset[here]] == here + step
    return found


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
    if len(program.edges):  # one may say again what the lane implies
        first = np.sort(np.unique(target * len(program) + source, return_index=True)[1])
        source, target = source[first], target[first]
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


def _stuck(order: Order, steps: np.ndarray) -> PrismError:
    """What each rank waits in: those that wait in a circle, then who waits for them."""
    matches, arrived = order.matches, np.zeros(len(order.owner), bool)
    gone = np.zeros(len(order.releases) + 1, bool)  # the last: of nodes that no release lets go
    arrived[steps[steps >= 0]] = True
    gone[-steps[steps < 0] - 1] = True
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
        text = node_text(order.graph, matches.rank_of(flat), matches.node_of(flat))
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
