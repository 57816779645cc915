"""The equations' least solution, found by letting every rank go on as far as it can: no order is needed beforehand.

What is streamed is small: of each node a code, how long it takes and when it ends. A node
that just follows the one before it needs no more; what others wait for is looked up in the program, which ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.compiled import Kernel, part, prefetch
from prism_tools.graph.model import Durations, Ragged
from prism_tools.graph.releases import eager_pairs, reverse

if TYPE_CHECKING:
    from prism_tools.graph.order import Order

NEVER = -(2**62)  # the end of a node that has not ended
ALONE = -1
NEAR = 64
EAGER = -3  # where the count of those that have come to an eager pair begins: it is below 0 till the end


@dataclass
class Layout:
    """``code``: 2 * c + f of each flat node. c: its match; ALONE: it has none; ALONE - 1 - k: it leaves by itself, in the k-th
    of ``Order.apart``. f: 1 if only the next node of the program waits for it, and for nothing else. ``member``: as
    ``Matches.members``; ``opens``: row k: those of ``Order.apart`` in which the node that leaves in the k-th arrives;
    ``near``: laid-out rank of every NEAR-th flat node.
    All int32 if they fit: half the memory takes a fifth less time."""

    code: np.ndarray
    member: np.ndarray
    opens: Ragged
    near: np.ndarray

    def apart(self, node: int) -> int:
        """k, if flat ``node`` leaves by itself; else -1."""
        return max(ALONE - 1 - (int(self.code[node]) >> 1), -1)


def layout_of(order: Order) -> Layout:
    """The layout of all nodes."""
    base, apart, programs, total = order.base, order.apart, order.programs, int(order.base[-1])
    kind = np.int32 if max(total, len(apart.going)) < 2**29 else np.int64
    code = np.empty(total, kind)
    _encode(total, base, programs.first, programs.follows, order.matches.of_node, code)
    code[apart.going] = 2 * (ALONE - 1 - np.arange(len(apart.going))) + (code[apart.going] & 1)
    numbers = ALONE - 1 - (code[apart.coming.data] >> 1).astype(np.int64)
    opens = reverse(Ragged(apart.coming.offset, numbers), len(apart.going))
    near = np.searchsorted(base, np.arange(0, total, NEAR), side="right") - 1
    return Layout(code, order.matches.members.data.astype(kind), opens, near.astype(kind))


@Kernel
def _encode(base, first, follows, of_node, code):
    for rank in range(len(base) - 1):
        shift = first[rank] - base[rank]
        for node in range(base[rank], base[rank + 1]):
            code[node] = 2 * of_node[node] + follows[shift + node]


def gaps(order: Order, durations: Durations) -> np.ndarray:
    """What each flat node adds to the latest that it waits for, ns; int32 if all of them fit."""
    base, gap = order.base, np.empty(int(order.base[-1]), np.int32)
    for k, row in enumerate(durations.row[order.matches.classes.lowest].tolist()):
        own, tail = durations.own[row], durations.tail[row]
        if gap.dtype == np.int32 and int(own.max(initial=0)) + int(tail.max(initial=0)) >= 2**31:
            gap = gap.astype(np.int64)
        np.add(own, tail, out=gap[base[k] : base[k + 1]], casting="unsafe")
    return gap


def ends(order: Order, durations: Durations) -> np.ndarray:
    """int64 ns: when each flat node ends. PrismError if some never do, because they wait for each other."""
    programs, offset, apart, layout = order.programs, order.matches.members.offset, order.apart, order.layout
    gap, heads = gaps(order, durations), programs.heads(order.base)
    ready, when = np.empty(len(gap), layout.code.dtype), np.empty(len(gap), np.int64)  # only what is used takes memory
    ready[: len(heads)], when[: len(heads)] = heads[::-1], 0
    met = np.zeros(2 * len(order.matches), np.int64)
    met[1::2][eager_pairs(order.matches)] = EAGER
    most = max(int(np.diff(rows).max(initial=2)) for rows in (offset, layout.opens.offset))
    end = np.full(len(gap), NEVER, np.int64)
    count = _run(
        len(gap), len(heads), ready, when, order.base, programs.first, programs.before.offset, programs.before.data,
        programs.after.offset, programs.after.data, layout.near, layout.code, gap, offset, layout.member,
        layout.opens.offset, layout.opens.data, np.diff(apart.coming.offset), apart.going, met,
        np.zeros(len(apart.going), np.int64), np.empty(2 * most, np.int64), end,
    )  # fmt: skip
    if count < len(gap):
        _ = order.steps  # raises PrismError
    return end


@Kernel
def _run(
    top, ready, when, base, first, before_at, before, after_at, after, near, code, gap, member_at, member, opens_at, opens,
    missing, leaver, met, latest, ended, end,
):  # fmt: skip
    """Fill in ``end``, from the first ``top`` nodes that are ready; returns how many nodes have ended.

    ``met``: of each match the latest arrival, and how many have come (more than EAGER); ``latest``, ``missing``: of the
    releases apart. ``ended``: pairs (node, when); their ends are written one by one, each just before what waits for it is
    looked at: so a node that waits for several goes on once.
    """
    count = 0
    while top:
        top -= 1
        node, time = ready[top], when[top]
        while code[node] == 2 * ALONE + 1:
            time += gap[node]
            end[node] = time
            node += 1
            count += 1
        what, many = code[node] >> 1, 0
        if what >= 0:
            low, high, come = member_at[what], member_at[what + 1], met[2 * what + 1] + 1
            if come < 0 and member[low] == node:  # sends eagerly
                ended[0], ended[1], many = node, time + gap[node], 1
            time = max(time, met[2 * what])
            met[2 * what], met[2 * what + 1] = time, come
            if come == 1:
                prefetch(met, 2 * what + 8)
                prefetch(member, low + 24)
                prefetch(member_at, what + 8)
            for at in range(low + (come < 0), high if come in (high - low, EAGER + 2) else 0):
                ended[2 * many], ended[2 * many + 1], many = member[at], time + gap[member[at]], many + 1
        elif what == ALONE:
            ended[0], ended[1], many = node, time + gap[node], 1
        else:
            many = _apart(ALONE - 1 - what, time, opens_at, opens, missing, leaver, latest, gap, ended)
        for k in range(many):
            node = ended[2 * k]
            end[node] = ended[2 * k + 1]
            prefetch(code, node + 16)
            prefetch(gap, node + 16)
            prefetch(end, node + 8)
            if code[node] & 1:
                ready[top], when[top] = node + 1, end[node]
                top += 1
            else:
                top = _freed(node, base, near, first, before_at, before, after_at, after, end, top, ready, when)
        count += many
    return count


@part
def _apart(mine, time, opens_at, opens, missing, leaver, latest, gap, ended):
    """The node that leaves in the release apart ``mine`` arrives: put who can leave into ``ended``; returns how many."""
    many = 0
    for at in range(opens_at[mine], opens_at[mine + 1]):
        gate = opens[at]
        latest[gate] = max(latest[gate], time)
        missing[gate] -= 1
        if not missing[gate]:
            ended[2 * many], ended[2 * many + 1] = leaver[gate], latest[gate] + gap[leaver[gate]]
            many += 1
    return many


@part
def _freed(node, base, near, first, before_at, before, after_at, after, end, top, ready, when):
    """``node`` has ended: put what waited for it alone on top; returns the new top."""
    rank = near[node // NEAR]
    while base[rank + 1] <= node:
        rank += 1
    start, shift = base[rank], first[rank]
    for at in range(after_at[shift + node - start], after_at[shift + node - start + 1]):
        place, time = shift + after[at], 0
        for source in range(before_at[place + 1] - 1, before_at[place] - 1, -1):  # what is missing is mostly the last
            if end[start + before[source]] == NEVER:
                time = NEVER
                break
            time = max(time, end[start + before[source]])
        if time != NEVER:
            ready[top], when[top] = start + after[at], time
            top += 1
    return top


def arrivals(order: Order, end: np.ndarray) -> np.ndarray:
    """int64 ns: when each flat node in a match arrives; 0 for all others."""
    arrival, before = np.zeros(len(end), np.int64), order.programs.before
    _arrive(len(end), order.base, order.programs.first, before.offset, before.data, order.matches.of_node, end, arrival)
    return arrival


@Kernel
def _arrive(base, first, before_at, before, of_node, end, arrival):
    for rank in range(len(base) - 1):
        start, shift = base[rank], first[rank] - base[rank]
        for node in range(start, base[rank + 1]):
            if of_node[node] >= 0:
                for at in range(before_at[shift + node], before_at[shift + node + 1]):
                    arrival[node] = max(arrival[node], end[start + before[at]])
