"""Every invariant of a graph, one named function each: ``graph -> list of problems``, empty where it holds."""

from __future__ import annotations

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph, Timing
from prism_tools.graph.names import node_text, ranks_text
from prism_tools.graph.order import dependency_order
from prism_tools.graph.releases import releases
from prism_tools.graph.schema import DTYPES, EPILOGUE, HOST_LANE, PROLOGUE, UNKNOWN, Kind, Op, Reduce
from prism_tools.graph.semantics import is_queue
from prism_tools.graph.structure import STRUCTURE, timings

SHOWN = 20  # problems listed per invariant
COUNTED = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER, Op.GATHER)  # every member gives the same number of elements


def check(graph: Graph) -> list[str]:
    """All problems, "invariant: problem". If the tables do not fit each other, only that is reported."""
    lines = _run(graph, STRUCTURE)
    return lines or _run(graph, [function for function in CHECKS if function not in STRUCTURE])


def _run(graph: Graph, functions: list) -> list[str]:
    lines = []
    for function in functions:
        found = function(graph)
        lines += [f"{function.__name__}: {line}" for line in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"{function.__name__}: {len(found) - SHOWN} more")
    return lines


def matches_complete(graph: Graph) -> list[str]:
    """Every communication has all its members, and they call the same operation."""
    return find_matches(graph, strict=False).problems


def matches_consistent(graph: Graph) -> list[str]:
    """The members of a match agree in type, reduction, root, and number of elements where they must."""
    matches = find_matches(graph, strict=False)
    lines: list[str] = []
    for name in ("dtype", "reduce", "root", "count"):
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


def acyclic(graph: Graph) -> list[str]:
    """No node waits for itself, through lanes, edges and matches."""
    try:
        dependency_order(graph, find_matches(graph, strict=False))
    except PrismError as error:
        return [str(error)]
    return []


def segments_monotone(graph: Graph) -> list[str]:
    """Segments run prologue, 0, 1, …, epilogue, without a step back or a gap."""
    lines = []
    for p, program in enumerate(graph.programs):
        segment = program.segment.astype(np.int64)
        count = int(segment.max(initial=PROLOGUE)) + 1
        place = np.where(segment == EPILOGUE, count, segment)
        back = np.flatnonzero(place[1:] < place[:-1])
        if len(back):
            lines.append(f"program {p}: node {back[0] + 1} steps back to segment {segment[back[0] + 1]}")
        missing = np.setdiff1d(np.arange(count), segment)
        if len(missing):
            lines.append(f"program {p}: no node is in iteration {missing[0]}")
    return lines


def iterations_equal(graph: Graph) -> list[str]:
    """All ranks ran the same number of iterations."""
    counts = np.array([int(program.segment.max(initial=-1)) + 1 for program in graph.programs])[graph.ranks.program]
    parts = [f"ranks {ranks_text(np.flatnonzero(counts == n))} ran {n}" for n in np.unique(counts)]
    return ["; ".join(parts)] if len(parts) > 1 else []


def times_monotone(graph: Graph) -> list[str]:
    """Measured times: end >= start >= 0 (or unknown), and the host's nodes follow each other."""
    lines = []
    for name, timing in timings(graph):
        lines += [line for k in range(len(timing.rank)) for line in _row_times(graph, name, timing, k)]
    return lines


def refuse_backwards(graph: Graph, name: str = "") -> None:
    """PrismError if a clock went backwards in what was measured; ``name``: of the file, if several were given."""
    if backwards := times_monotone(graph):
        file = f"{name}: " if name else ""
        raise PrismError(f"{file}{backwards[0]}; a clock went backwards, run prism-slice again")


def durations_sane(graph: Graph) -> list[str]:
    """Durations, tails and their half-widths are not negative."""
    if graph.durations is None:
        return []
    lines = []
    for name in ("own", "tail", "spread", "bias"):
        for k, row in enumerate(getattr(graph.durations, name)):
            bad = np.flatnonzero(row < 0)
            if len(bad):
                lines.append(f"row {k}: {name} of node {bad[0]} is negative")
    return lines


def timeline_respects_edges(graph: Graph) -> list[str]:
    """Solved times: nodes start after their lane's predecessor and edges' sources ended; waits end after these."""
    timeline = graph.timeline
    if timeline is None:
        return []
    lines = []
    for rank in range(graph.world_size):
        start, end = timeline.start[timeline.row[rank]], timeline.end[timeline.row[rank]]
        program = graph.program_of(rank)
        bad = np.flatnonzero((end < start) | (start < 0))
        if len(bad):
            lines.append(f"{node_text(graph, rank, int(bad[0]))} ends before it starts, or starts before 0")
        source, target = program.edges.T
        late = np.where(program.kind[target] == Kind.WAIT, end[target], start[target]) < end[source]
        pairs = [program.edges[late]]
        for lane, name in enumerate(graph.lanes):
            nodes = np.flatnonzero(program.lane == lane) if is_queue(name) else np.empty(0, np.int64)
            overlap = start[nodes[1:]] < end[nodes[:-1]]
            pairs.append(np.stack([nodes[:-1][overlap], nodes[1:][overlap]], 1))
        for a, b in np.concatenate(pairs)[:1].tolist():
            lines.append(f"{node_text(graph, rank, b)} starts before {node_text(graph, rank, a)} ended")
    return lines


def timeline_respects_matches(graph: Graph) -> list[str]:
    """Solved times: nobody leaves a match before those it waits for have arrived."""
    timeline = graph.timeline
    if timeline is None:
        return []
    matches = find_matches(graph, strict=False)
    empty = [np.empty(0, np.int64)]
    start = np.concatenate(empty + [timeline.start[k] for k in timeline.row])
    end = np.concatenate(empty + [timeline.end[k] for k in timeline.row])
    lines = []
    for match in range(len(matches)):
        for arrivals, leavers in releases(graph, matches, match):
            bad = [node for node in leavers if end[node] < start[arrivals].max()]
            if bad:
                lines.append(f"{_node(graph, matches, bad[0])} ends before all it waits for have arrived")
                break
    return lines


def _row_times(graph: Graph, name: str, timing: Timing, k: int) -> list[str]:
    rank, start, end = int(timing.rank[k]), timing.start[k], timing.end[k]
    known = (start != UNKNOWN) & (end != UNKNOWN)
    bad = np.flatnonzero(known & ((start < 0) | (end < start)))
    if len(bad):
        return [f"{name} row {k}: {node_text(graph, rank, int(bad[0]))} ends before it starts, or starts before 0"]
    host = np.flatnonzero((graph.program_of(rank).lane == HOST_LANE) & known)
    back = np.flatnonzero((start[host][1:] < start[host][:-1]) | (end[host][1:] < end[host][:-1]))
    if len(back):
        node = int(host[back[0] + 1])
        return [f"{name} row {k}: {node_text(graph, rank, node)} is earlier than the host's node before it"]
    return []


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
    """A program or value column of all ranks, by flat node."""
    rows = range(graph.world_size)
    if name == "count":
        chosen = [graph.values_of(rank).columns[name] for rank in rows]
    else:
        chosen = [graph.program_of(rank).columns[name] for rank in rows]
    return np.concatenate(chosen).astype(np.int64)


def _node(graph: Graph, matches: Matches, flat: int) -> str:
    return node_text(graph, matches.rank_of(flat), matches.node_of(flat))


def _value_text(name: str, value: int) -> str:
    if name == "dtype":
        return DTYPES[value]
    return Reduce(value).name.lower() if name == "reduce" else str(value)


CHECKS = [
    *STRUCTURE,
    matches_complete,
    matches_consistent,
    acyclic,
    segments_monotone,
    iterations_equal,
    times_monotone,
    durations_sane,
    timeline_respects_edges,
    timeline_respects_matches,
]
