"""The table of process groups: sums over members of a class, and who is last in each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from prism_tools.analyze.lateness import Lateness, lateness
from prism_tools.analyze.tables import Filter, Times
from prism_tools.analyze.text import Row
from prism_tools.graph.alike import Seats, matches_alike
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import op_text, ranks_text
from prism_tools.graph.schema import P2P


def groups(graph: Graph, **chosen: Any) -> list[Row]:
    """One row a group that has a chosen node: operations and bytes; with a timeline its time per member, and who is
    last in it how often in the counted iterations. ``chosen``: as for ranks."""
    which = Filter(graph, **chosen)
    matches = _matches(graph, which)
    seats, wanted = Seats(graph, matches), _wanted(matches, which)
    hit = np.zeros(len(matches), bool)
    hit[matches.of_node[wanted]] = True
    did, sums = _operations(graph, matches, seats, hit), _sums(graph, matches, seats, wanted)
    latest = _latest(lateness(graph, matches), hit) if graph.timeline is not None else None
    rows = []
    for group, members in enumerate(graph.groups.members):
        if not did[group]:
            continue
        row: Row = {
            "group": graph.groups.name[group],
            "backend": graph.groups.backend[group],
            "size": len(members),
            "operations": did[group].total(),
            "mostly": op_text(did[group].most_common(1)[0][0]),
            "bytes": int(sums["bytes"][group]),
        }
        if latest is not None:
            row |= {name: int(sums[name][group]) // len(members) for name in ("comm_ns", "wait_ns")}
            place, times = latest.get(group, (-1, 0))
            row |= {"last_rank": int(members[place]) if times else None, "last_times": times}
        rows.append(row | {"members": ranks_text(members)})
    return rows


def _matches(graph: Graph, which: Filter) -> Matches:
    """Of classes of ranks that are chosen, or not, as one, and so are their groups."""
    known: dict[bytes, int] = {}
    named = [known.setdefault(which.named_slots(rank), len(known)) for rank in range(graph.world_size)]
    timed = [part.row for part in (graph.timeline, graph.durations) if part is not None]
    return matches_alike(graph, np.isin(np.arange(graph.world_size), which.ranks), np.array(named), *timed)


def _wanted(matches: Matches, which: Filter) -> np.ndarray:
    """The chosen flat nodes that are in a match."""
    chosen, lowest = set(which.ranks), matches.classes.lowest.tolist()
    parts = [matches.flat(rank, which.nodes(rank)) for rank in lowest if rank in chosen]
    wanted = np.concatenate([np.empty(0, np.int64), *parts])
    return wanted[matches.of_node[wanted] >= 0]


def _operations(graph: Graph, matches: Matches, seats: Seats, hit: np.ndarray) -> list[Counter[int]]:
    """Of each group: how many of each operation are in ``hit`` (bool per match), in order."""
    members, rows = matches.classes.members, np.flatnonzero(hit)
    pairwise = np.isin(matches.op[rows], P2P)
    of_class: dict[int, Counter[int]] = {}
    together = rows[~pairwise]
    for number, op in zip(
        matches.classes.of_group[matches.group[together]].tolist(), matches.op[together].tolist(), strict=True
    ):
        of_class.setdefault(number, Counter())[op] += 1
    found = [Counter(of_class.get(number)) for number in matches.classes.of_group.tolist()]
    first = matches.members.offset[rows[pairwise]]  # who sends; groups of one class may differ in their pairs
    for op in np.unique(matches.op[rows[pairwise]]).tolist():
        of_seat = np.bincount(seats.of_member[first[matches.op[rows[pairwise]] == op]], minlength=seats.count)
        for group, count in enumerate(np.bincount(members.group, of_seat[seats.of_entry], len(found)).tolist()):
            if count:
                found[group][op] = int(count)
    return found


def _sums(graph: Graph, matches: Matches, seats: Seats, wanted: np.ndarray) -> dict[str, np.ndarray]:
    """int64[groups]: of the ``wanted`` flat nodes of each group."""
    members = matches.classes.members
    seat = np.empty(int(matches.base[-1]), np.int64)
    seat[matches.members.data] = seats.of_member
    sums = {"bytes": _contributed(graph, matches, seats, wanted, seat)}
    if graph.timeline is not None:
        times = Times(graph, matches)
        for name, spent in (("comm_ns", times.end - times.held), ("wait_ns", times.held - times.start)):
            of_seat = np.zeros(seats.count, np.int64)
            np.add.at(of_seat, seat[wanted], spent[wanted])
            sums[name] = of_seat[seats.of_entry]
    found = {name: np.zeros(len(graph.groups), np.int64) for name in sums}
    for name, of_entry in sums.items():
        np.add.at(found[name], members.group, of_entry)
    return found


def _contributed(graph: Graph, matches: Matches, seats: Seats, wanted: np.ndarray, seat: np.ndarray) -> np.ndarray:
    """int64: the bytes of each entry of the groups' members; they may differ within a class."""
    rank, count = matches.classes.members.rank, len(graph.values)
    both, back = np.unique(matches.classes.of_rank.astype(np.int64) * count + graph.ranks.values, return_inverse=True)
    order = np.argsort(back[rank], kind="stable")
    ends = np.searchsorted(back[rank][order], np.arange(len(both) + 1))
    places = np.searchsorted(wanted, matches.base)
    found = np.zeros(len(rank), np.int64)
    for k, pair in enumerate(both.tolist()):
        at, mine = pair // count, order[ends[k] : ends[k + 1]]
        nodes = wanted[places[at] : places[at + 1]]
        of_slot = np.zeros(seats.width, np.int64)
        np.add.at(of_slot, seat[nodes] % seats.width, graph.values[pair % count].bytes[nodes - matches.base[at]])
        found[mine] = of_slot[seats.of_entry[mine] % seats.width]
    return found


def _latest(late: Lateness, hit: np.ndarray) -> dict[int, tuple[int, int]]:
    """Group → the place of who is last most often in matches that are ``hit``, of several the first, and how often."""
    found: dict[int, tuple[int, int]] = {}
    for seating, mine in late.where((late.lag > 0) & hit[late.match]).by_seating():
        found |= dict.fromkeys(late.seatings[seating].groups.tolist(), Counter(mine.place.tolist()).most_common(1)[0])
    return found
