"""The equations' least solution, found by letting every rank go on as far as it can: no order is needed beforehand.

What is streamed is small: of each node a code, what it takes and when it ends. A node that just follows the one before
it in its program needs no more; what others wait for is looked up in the program, which ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.compiled import Kernel
from prism_tools.graph.model import Durations, Ragged
from prism_tools.graph.releases import reverse

if TYPE_CHECKING:
    from prism_tools.graph.order import Order

NEVER = -(2**62)  # the end of a node that has not ended
ALONE = -1


@dataclass
class Layout:
    """``code``: 2 * c + f of each flat node, int32 if it fits. c: the release, of those in which all leave together, that
    the node arrives at; ALONE: it is in no match; ALONE - 1 - k: it leaves by itself, in the k-th of the other releases.
    f: 1 if nothing in its program waits for it but the next node, which waits for nothing else.

    ``opens``: row k: at which of the other releases the node that leaves in the k-th arrives.
    """

    code: np.ndarray
    opens: Ragged

    def release_of(self, node: int, together: int) -> int:
        """The release in which flat ``node`` leaves, the first ``together`` being those of everybody; -1: in none."""
        what = int(self.code[node]) >> 1
        return what if what >= ALONE else together + ALONE - 1 - what


def layout_of(order: Order) -> Layout:
    """The layout of all nodes."""
    releases, base = order.releases, order.base
    total = int(base[-1])
    code = np.full(total, ALONE, np.int32 if max(total, len(releases)) < 2**29 else np.int64)
    together, leavers = releases.everybody, releases.going.data
    code[together.data] = np.repeat(np.arange(len(together), dtype=code.dtype), np.diff(together.offset))
    code[leavers] = ALONE - 1 - np.arange(len(leavers), dtype=code.dtype)
    opens = reverse(Ragged(releases.coming.offset, ALONE - 1 - code[releases.coming.data]), len(leavers))
    code *= 2
    for k, first in enumerate(order.programs.first.tolist()):
        code[base[k] : base[k + 1]] += order.programs.follows[first : first + int(base[k + 1] - base[k])]
    return Layout(code, opens)


def gaps(order: Order, durations: Durations) -> np.ndarray:
    """What each flat node adds to the latest that it waits for, ns; int32 if all of them fit."""
    base, row = order.base, durations.row[order.matches.classes.lowest].tolist()
    gap = np.empty(int(base[-1]), np.int32)
    for k, r in enumerate(row):
        own, tail = durations.own[r], durations.tail[r]
        if gap.dtype == np.int32 and int(own.max(initial=0)) + int(tail.max(initial=0)) >= 2**31:
            gap = gap.astype(np.int64)
        np.add(own, tail, out=gap[base[k] : base[k + 1]], casting="unsafe")
    return gap


def ends(order: Order, durations: Durations) -> np.ndarray:
    """int64 ns: when each flat node ends. PrismError if some never do, because they wait for each other."""
    programs, releases, layout = order.programs, order.releases, order.layout
    gap = gaps(order, durations)
    ready, when = np.empty(len(gap), layout.code.dtype), np.empty(len(gap), np.int64)  # only what is used takes memory
    heads = programs.heads(order.base)
    ready[: len(heads)], when[: len(heads)] = heads[::-1], 0
    sizes = np.diff(releases.everybody.offset)
    end = np.full(len(gap), NEVER, np.int64)
    count = _run(
        len(gap), len(heads), ready, when, order.base, programs.first, programs.before.offset, programs.before.data,
        programs.after.offset, programs.after.data, order.owner, layout.code, gap, releases.everybody.offset,
        releases.everybody.data, layout.opens.offset, layout.opens.data, np.diff(releases.coming.offset),
        releases.going.data, np.zeros((len(sizes), 2), np.int64), np.zeros(len(releases.coming), np.int64),
        np.empty((1 + max(sizes.max(initial=0), np.diff(layout.opens.offset).max(initial=0)), 2), np.int64), end,
    )  # fmt: skip
    if count < len(gap):
        _ = order.steps  # raises PrismError
    return end


@Kernel
def _run(
    top, ready, when, base, first, before_at, before, after_at, after, owner, code, gap, member_at, member, opens_at,
    opens, missing, leaver, met, latest, ended, end,
):  # fmt: skip
    """Fill in ``end``, from the first ``top`` nodes that are ready; returns how many nodes have ended. ``met``: of each
    release that all leave together the latest arrival and how many have come; ``latest``, ``missing``: of the others."""
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
        if what == ALONE:
            ended[0, 0], ended[0, 1], many = node, time + gap[node], 1
        elif what >= 0:
            met[what, 0] = max(met[what, 0], time)
            met[what, 1] += 1
            if met[what, 1] == member_at[what + 1] - member_at[what]:
                for at in range(member_at[what], member_at[what + 1]):
                    ended[many, 0], ended[many, 1] = member[at], met[what, 0] + gap[member[at]]
                    many += 1
        else:
            for at in range(opens_at[ALONE - 1 - what], opens_at[ALONE - what]):
                gate = opens[at]
                latest[gate] = max(latest[gate], time)
                missing[gate] -= 1
                if not missing[gate]:
                    ended[many, 0], ended[many, 1] = leaver[gate], latest[gate] + gap[leaver[gate]]
                    many += 1
        count += many
        for k in range(many):
            node, time = ended[k, 0], ended[k, 1]
            end[node] = time  # only now, so that of two nodes that another one waits for the last finds both ended
            if code[node] & 1:
                ready[top], when[top] = node + 1, time
                top += 1
                continue
            start, shift = base[owner[node]], first[owner[node]]
            for at in range(after_at[shift + node - start], after_at[shift + node - start + 1]):
                place, time = shift + after[at], 0
                for source in range(before_at[place], before_at[place + 1]):
                    time = max(time, end[start + before[source]]) if end[start + before[source]] != NEVER else NEVER
                    if time == NEVER:
                        break
                if time != NEVER:
                    ready[top], when[top] = start + after[at], time
                    top += 1
    return count


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
