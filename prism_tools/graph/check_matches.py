"""Invariants of matches, ``graph, matches -> list of problems``: looked for among classes of ranks, and spelt out, where
there are some, rank by rank."""

from __future__ import annotations

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.alike import Seats, equal_rows, matches_alike
from prism_tools.graph.equations import flat
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import node_text
from prism_tools.graph.order import dependency_order
from prism_tools.graph.releases import all_releases, apart_of, releases
from prism_tools.graph.schema import DTYPES, Op, Reduce

SHOWN = 20  # problems listed per invariant
COUNTED = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER, Op.GATHER)  # every member gives the same number of elements
COLUMNS = ("dtype", "reduce", "root", "count")


def checked_matches(graph: Graph) -> Matches:
    """Of classes of ranks whose times, and numbers of elements where these count, are equal."""
    return matches_alike(graph, _counts(graph), *([graph.timeline.row] if graph.timeline is not None else []))


def _counts(graph: Graph) -> np.ndarray:
    """int64[W]: equal where the numbers of elements of all COUNTED operations are."""
    known: dict[bytes, int] = {}
    nodes = [np.flatnonzero(np.isin(program.op, COUNTED)) for program in graph.programs]
    both = graph.ranks.program.astype(np.int64) * max(len(graph.values), 1) + graph.ranks.values
    distinct, back = np.unique(both, return_inverse=True)
    keys = [
        graph.values[pair % len(graph.values)].count[nodes[pair // len(graph.values)]] for pair in distinct.tolist()
    ]
    return np.array([known.setdefault(key.tobytes(), len(known)) for key in keys], np.int64)[back]


def matches_complete(graph: Graph, matches: Matches) -> list[str]:
    """Every communication has all its members, and they call the same operation."""
    return matches.problems


def matches_consistent(graph: Graph, matches: Matches) -> list[str]:
    """The members of a match agree in type, reduction, root, and number of elements where they must."""
    if not any(_vary(graph, matches, name) for name in COLUMNS) and _splits_fit(graph, matches):
        return []
    matches, lines = _of_all(graph, matches), []
    for name in COLUMNS:
        column = _column(graph, matches, name)
        first = column[matches.members.data[matches.members.offset[:-1]]]
        owner = np.repeat(np.arange(len(matches)), np.diff(matches.members.offset))
        theirs = column[matches.members.data]
        differ = theirs != first[owner]
        if name == "dtype":
            differ &= (theirs >= 0) & (first[owner] >= 0)
        if name == "count":
            differ &= np.isin(matches.op[owner], COUNTED)
        for at in np.flatnonzero(differ)[: SHOWN + 1]:
            a, b = int(matches.members[owner[at]][0]), int(matches.members.data[at])
            values = " and ".join(_value_text(name, int(column[flat])) for flat in (a, b))
            lines.append(f"{_node(graph, matches, a)} and {_node(graph, matches, b)} differ in {name}: {values}")
    return lines + _split_problems(graph, matches)


def acyclic(graph: Graph, matches: Matches) -> list[str]:
    """No node waits for itself, through lanes, edges and matches."""
    try:
        dependency_order(graph, matches)
        return []
    except PrismError:  # a circle of classes is one of ranks
        try:
            dependency_order(graph, _of_all(graph, matches))
        except PrismError as error:
            return [str(error)]
    return []


def timeline_respects_matches(graph: Graph, matches: Matches) -> list[str]:
    """Solved times: nobody leaves a match before those it waits for have arrived."""
    timeline = graph.timeline
    if timeline is None or not _leave_early(graph, matches, *_times(graph, matches)).any():
        return []
    matches = _of_all(graph, matches)
    start, end = _times(graph, matches)
    early, lines = _leave_early(graph, matches, start, end), []
    for match in np.unique(matches.of_node[early]).tolist():
        for arrivals, leavers in releases(graph, matches, match):
            bad = [node for node in leavers if end[node] < start[arrivals].max()]
            if bad:
                lines.append(f"{_node(graph, matches, bad[0])} ends before all it waits for have arrived")
                break
    return lines


def _of_all(graph: Graph, matches: Matches) -> Matches:
    return matches if len(matches.classes) == graph.world_size else find_matches(graph, strict=False)


def _times(graph: Graph, matches: Matches) -> tuple[np.ndarray, np.ndarray]:
    """Solved start and end by flat node."""
    assert graph.timeline is not None
    row = graph.timeline.row[matches.classes.lowest]
    return flat(graph.timeline.start, row), flat(graph.timeline.end, row)


def _leave_early(graph: Graph, matches: Matches, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The flat nodes that end before all that they wait for have arrived."""
    gates = all_releases(matches, apart_of(graph, matches))
    if not len(gates):
        return np.empty(0, np.int64)
    latest = np.maximum.reduceat(start[gates.arrivals.data], gates.arrivals.offset[:-1])
    return gates.leavers.data[end[gates.leavers.data] < np.repeat(latest, np.diff(gates.leavers.offset))]


def _vary(graph: Graph, matches: Matches, name: str) -> bool:
    """Whether known values of a column vary within some match."""
    if not len(matches):
        return False
    theirs, first = _column(graph, matches, name)[matches.members.data], matches.members.offset[:-1]
    known = (theirs >= 0) | (name != "dtype")
    most = np.maximum.reduceat(np.where(known, theirs, np.iinfo(np.int64).min), first)
    least = np.minimum.reduceat(np.where(known, theirs, np.iinfo(np.int64).max), first)
    return bool(np.any((most > least) & (np.isin(matches.op, COUNTED) | (name != "count"))))


def _splits_fit(graph: Graph, matches: Matches) -> bool:
    """Whether no all_to_all has a split problem."""
    picked = np.flatnonzero(matches.op == Op.ALL_TO_ALL)
    if not len(picked) or not any(len(values.splits.data) for values in graph.values):
        return True
    seats, members = Seats(graph, matches), matches.classes.members
    for part in seats.seated(picked):
        groups = seats.seatings[part.number].groups
        size = int(members.size[groups[0]])
        if len(part.place) != size:
            continue
        values = graph.ranks.values[members.rank[members.start[groups][:, None] + np.arange(size)]]
        node = part.nodes - matches.base[np.searchsorted(matches.base, part.nodes[0], side="right") - 1]
        step = max(2**22 // (2 * size * size), 1)
        for _, row in equal_rows(values):
            for first in range(0, len(node), step):
                if not _tables_fit(graph, node[first : first + step], row):
                    return False
    return True


def _tables_fit(graph: Graph, node: np.ndarray, values: np.ndarray) -> bool:
    """Whether the members of all_to_alls agree: of each row their nodes; ``values``: of each member."""
    size = node.shape[1]
    splits = [graph.values[number].splits for number in values.tolist()]
    lengths = np.stack(
        [rows.offset[nodes + 1] - rows.offset[nodes] for rows, nodes in zip(splits, node.T, strict=True)]
    )
    node = node[np.all(lengths == 2 * size, axis=0)]
    table = np.empty((size, len(node), 2 * size), np.int64)
    for place, (rows, nodes) in enumerate(zip(splits, node.T, strict=True)):
        table[place] = rows.data[rows.offset[nodes][:, None] + np.arange(2 * size)]
    return np.array_equal(table[:, :, :size], table[:, :, size:].transpose(2, 1, 0))


def _split_problems(graph: Graph, matches: Matches) -> list[str]:
    """all_to_all: what i sends to j is what j receives from i, wherever both have their splits."""
    lines = []
    for m in np.flatnonzero(matches.op == Op.ALL_TO_ALL).tolist():
        flats, size = matches.members[m], len(graph.groups.members[matches.group[m]])
        rows = [graph.values_of(matches.rank_of(f)).splits[matches.node_of(f)] for f in flats]
        if len(rows) != size or any(len(row) != 2 * size for row in rows):
            continue
        table = np.stack(rows)
        for i, j in np.argwhere(table[:, :size] != table[:, size:].T)[:1].tolist():
            lines.append(
                f"{_node(graph, matches, int(flats[i]))} sends {table[i, j]} B to "
                f"rank {matches.rank_of(flats[j])}, which expects {table[j, size + i]} B"
            )
    return lines


def _column(graph: Graph, matches: Matches, name: str) -> np.ndarray:
    """A program or value column by flat node."""
    ranks = matches.classes.lowest.tolist()
    if name == "count":
        chosen = [graph.values_of(rank).columns[name] for rank in ranks]
    else:
        chosen = [graph.program_of(rank).columns[name] for rank in ranks]
    return np.concatenate([np.empty(0, np.int64), *chosen]).astype(np.int64)


def _node(graph: Graph, matches: Matches, flat: int) -> str:
    return node_text(graph, matches.rank_of(flat), matches.node_of(flat))


def _value_text(name: str, value: int) -> str:
    if name == "dtype":
        return DTYPES[value]
    return Reduce(value).name.lower() if name == "reduce" else str(value)
