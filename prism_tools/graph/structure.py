"""Invariants of the tables themselves: what must hold before one may index another. Cheap, so that read runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from prism_tools.graph.members import Members
from prism_tools.graph.model import Graph, Program, Ragged, Timing
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import (
    DTYPES,
    EPILOGUE,
    HOST_LANE,
    NODE_COLUMNS,
    P2P,
    ROOTED,
    VALUE_COLUMNS,
    Kind,
    Op,
    Reduce,
    Source,
)

COMM_OPS = tuple(op for op in Op if op not in (Op.NONE, Op.OPTIMIZER_STEP))
OPS_OF_KIND: dict[int, tuple[int, ...]] = {
    Kind.COMPUTE: (Op.NONE,),
    Kind.COMM: COMM_OPS,
    Kind.WAIT: (Op.NONE, *COMM_OPS),
    Kind.MARK: (Op.OPTIMIZER_STEP,),
}


def offsets_in_range(graph: Graph) -> list[str]:
    """Ranks name programs and values that exist and are equally long; offsets of ragged rows fit their data."""
    ranks, lines = graph.ranks, []
    for name, table in (("program", graph.programs), ("values", graph.values)):
        column = getattr(ranks, name)
        if len(column) != graph.world_size or _outside(column, 0, len(table)):
            return [f"ranks name {name} rows outside 0-{len(table) - 1}"]
    if ranks.ran is not None and _outside(ranks.ran, 0, graph.world_size):
        lines.append(f"ranks name a rank that ran outside 0-{graph.world_size - 1}")
    for p, program in enumerate(graph.programs):
        if any(len(program.columns.get(name, ())) != len(program) for name in NODE_COLUMNS):
            lines.append(f"program {p}: its columns are not equally long")
    for v, values in enumerate(graph.values):
        lengths = {len(values.columns.get(name, ())) for name in VALUE_COLUMNS} | {len(values.splits)}
        if len(lengths) > 1 or not _fits(values.splits):
            lines.append(f"values {v}: its columns are not equally long, or its splits do not fit")
    for p, v in sorted(set(zip(ranks.program.tolist(), ranks.values.tolist(), strict=True))):
        if not lines and len(graph.programs[p]) != len(graph.values[v].columns["bytes"]):
            lines.append(f"values {v} do not have one row for each node of program {p}")
    return lines


def rows_in_range(graph: Graph) -> list[str]:
    """Measured, solved and replayed rows belong to ranks that exist and have one entry for each of their nodes."""
    lines = [] if _fits_store(graph) else ["store: it names ranks that do not exist"]
    for name, timing in timings(graph):
        lines += _timing_rows(graph, name, timing)
    if graph.memory is not None and _outside(graph.memory.rank, 0, graph.world_size):
        lines.append("memory: it names ranks that do not exist")
    if graph.probes is not None and (
        _outside(graph.probes.op, 0, len(Op)) or _outside(graph.probes.dtype, -1, len(DTYPES))
    ):
        lines.append("probes: they name operations or types that do not exist")
    if graph.durations is not None:
        lines += _class_rows(graph, "durations", ("own", "tail", "spread", "bias", "source"))
        if any(_outside(row, 0, len(Source)) for row in graph.durations.source):
            lines.append("durations: they name sources that do not exist")
    if graph.timeline is not None:
        lines += _class_rows(graph, "timeline", ("start", "end"))
        if not _exist(graph, graph.timeline.critical):
            lines.append("timeline: its critical path names nodes that do not exist")
    if graph.steady is not None and not _exist(graph, graph.steady.critical):
        lines.append("steady: its critical cycle names nodes that do not exist")
    return lines


def _exist(graph: Graph, path: np.ndarray) -> bool:
    """Whether the graph has all nodes of ``path``, int64[n, 2] of (rank, node)."""
    lengths = np.array([len(program) for program in graph.programs])[graph.ranks.program]
    rank, node = path.T
    return not _outside(rank, 0, graph.world_size) and bool(np.all((node >= 0) & (node < lengths[rank])))


def columns_legal(graph: Graph) -> list[str]:
    """Kinds, operations, lanes, types, reductions, call sites and segments are ones that exist, and fit each other."""
    lines = [] if graph.lanes[:1] == ["host"] else ["lanes: the first one is not the host's"]
    for p, program in enumerate(graph.programs):
        limits = {
            "lane": (HOST_LANE, len(graph.lanes)),
            "dtype": (-1, len(DTYPES)),
            "reduce": (0, len(Reduce)),
            "callsite": (-1, len(graph.strings)),
            "batch": (-1, 2**31 - 1),
            "segment": (EPILOGUE, 2**31 - 1),
        }
        for name, (low, high) in limits.items():
            lines += _bad_nodes(
                p, (program.columns[name] < low) | (program.columns[name] >= high), f"has no such {name}"
            )
        legal = np.zeros(len(program), bool)
        for kind, ops in OPS_OF_KIND.items():
            legal |= (program.kind == kind) & np.isin(program.op, ops)
        lines += _bad_nodes(p, ~legal, "has a kind and an operation that do not belong together")
    return lines


def edges_forward(graph: Graph) -> list[str]:
    """Edges lead from an earlier node of the program to a later one."""
    lines = []
    for p, program in enumerate(graph.programs):
        source, target = program.edges.reshape(-1, 2).T
        bad = np.flatnonzero((source < 0) | (source >= target) | (target >= len(program)))
        if len(bad):
            lines.append(f"program {p}: edge {source[bad[0]]}-{target[bad[0]]} does not lead forward{_more(bad)}")
    return lines


def groups_legal(graph: Graph) -> list[str]:
    """Groups have members that exist, each once; every communication's slot leads to a group with this rank in it."""
    lines, members = [], Members(graph)
    bad = (members.rank < 0) | (members.rank >= graph.world_size) | members.repeated
    bad_groups = (np.bincount(members.group, bad, len(graph.groups)) > 0) | (members.size == 0)
    for group in np.flatnonzero(bad_groups).tolist():
        lines.append(f"group {graph.groups.name[group]}: its members are not ranks, each once")
    if len(graph.ranks.slots) != graph.world_size:
        lines.append("ranks: not every rank has a list of groups")
    strange = np.flatnonzero((members.slot_group < 0) | (members.slot_group >= len(graph.groups)))
    if len(strange):
        rank = np.searchsorted(members.slot_start, strange[0], side="right") - 1
        lines.append(f"rank {rank}: its list of groups names some that do not exist")
    if lines:
        return lines
    for p, program in enumerate(graph.programs):
        ranks = np.flatnonzero(graph.ranks.program == p)
        for slot, limit in _slot_limits(program).items():
            lines += _slot_problems(graph, members, ranks, slot, limit)
    return lines


def _slot_problems(
    graph: Graph, members: Members, ranks: np.ndarray, slot: int, limit: tuple[int, int, bool]
) -> Iterator[str]:
    """Problems of ``ranks``, which all communicate in ``slot``."""
    peer, root, known = limit
    counts = np.diff(members.slot_start)[ranks]
    short = np.flatnonzero((slot < 0) | (slot >= counts))
    if len(short):
        has = f"it has {counts[short[0]]} groups"
        yield f"rank {ranks[short[0]]}: communication in group slot {slot}; {has}{_more(short)}"
        return
    group = members.in_slot(ranks, slot)
    stranger = members.place(group, ranks) < 0
    for bad, problem in (
        (stranger, "communication in group {}; it is no member"),
        (~stranger & ((max(peer, root) >= members.size[group]) | (not known)), "peer or root outside group {}"),
    ):
        found = np.flatnonzero(bad)
        if len(found):
            name = graph.groups.name[group[found[0]]]
            yield f"rank {ranks[found[0]]}: {problem.format(name)}{_more(found)}"


def _class_rows(graph: Graph, name: str, columns: tuple[str, ...]) -> list[str]:
    """Problems of a part that has one row for each class of ranks."""
    part = getattr(graph, name)
    lengths = np.array([[len(row) for row in getattr(part, column)] for column in columns], np.int64)
    if len(part.row) != graph.world_size or _outside(part.row, 0, lengths.shape[1]):
        return [f"{name}: ranks name rows outside 0-{lengths.shape[1] - 1}"]
    nodes = np.array([len(program) for program in graph.programs], np.int64)[graph.ranks.program]
    wrong = np.flatnonzero((lengths[:, part.row] != nodes).any(axis=0))
    return [f"{name}: the rows of ranks {ranks_text(wrong)} do not have one entry for each node"] if len(wrong) else []


def timings(graph: Graph) -> list[tuple[str, Timing]]:
    """The measured rows of a graph, by the name of their group."""
    both = (("timing", graph.timing), ("replay", graph.replay.timing if graph.replay else None))
    return [(name, timing) for name, timing in both if timing is not None]


def _slot_limits(program: Program) -> dict[int, tuple[int, int, bool]]:
    """For each slot in use: largest peer and root, and whether roots are known (peers may not be: receive from any)."""
    comm = program.kind == Kind.COMM
    result = {}
    for slot in np.unique(program.slot[comm]).tolist():
        here = comm & (program.slot == slot)
        peer, root = program.peer[here & np.isin(program.op, P2P)], program.root[here & np.isin(program.op, ROOTED)]
        known = peer.min(initial=0) >= -1 and root.min(initial=0) >= 0
        result[slot] = int(peer.max(initial=0)), int(root.max(initial=0)), bool(known)
    return result


def _timing_rows(graph: Graph, name: str, timing: Timing) -> Iterator[str]:
    columns = [getattr(timing, column) for column in ("host_issue", "ready", "start", "end")]
    rows = [timing.slice, timing.repeat, timing.clock_offset, timing.clock_drift, timing.clock_error, *columns]
    if any(len(row) != len(timing.rank) for row in rows) or len(timing.iteration_ns) not in (0, len(timing.rank)):
        yield f"{name}: its columns are not equally long"
    elif _outside(timing.rank, 0, graph.world_size):
        yield f"{name}: it names ranks that do not exist"
    else:
        for k, rank in enumerate(timing.rank.tolist()):
            if any(len(column[k]) != len(graph.program_of(rank)) for column in columns):
                yield f"{name}: row {k} does not have one entry for each node of rank {rank}"


def _fits_store(graph: Graph) -> bool:
    store = graph.store
    lengths = {len(store.rank), len(store.op), len(store.key), len(store.value)}
    return len(lengths) == 1 and not _outside(store.rank, 0, graph.world_size)


def _fits(ragged: Ragged) -> bool:
    offset = ragged.offset
    return bool(len(offset) and offset[0] == 0 and offset[-1] == len(ragged.data) and np.all(offset[1:] >= offset[:-1]))


def _outside(column: np.ndarray | Sequence[int], low: int, high: int) -> bool:
    column = np.asarray(column)
    return bool(len(column) and (column.min() < low or column.max() >= high))


def _bad_nodes(program: int, bad: np.ndarray, problem: str) -> list[str]:
    nodes = np.flatnonzero(bad)
    return [f"program {program}: node {nodes[0]} {problem}{_more(nodes)}"] if len(nodes) else []


def _more(found: np.ndarray) -> str:
    return f" ({len(found) - 1} more like it)" if len(found) > 1 else ""


def structure_problem(graph: Graph) -> str:
    """The first problem with the tables, or ""."""
    return next((problems[0] for function in STRUCTURE if (problems := function(graph))), "")


STRUCTURE = [offsets_in_range, columns_legal, edges_forward, groups_legal, rows_in_range]
