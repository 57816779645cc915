"""Whether the sandbox does what was recorded: the first operation that differs, in one line."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_tools.capture.server import Group, Operation
from prism_tools.errors import PrismError
from prism_tools.graph.model import Graph
from prism_tools.graph.names import callsite_text
from prism_tools.graph.schema import Kind, Op

COMPARED = ("kind", "op", "lane", "slot", "peer", "root", "dtype", "reduce")


def expected_text(graph: Graph, rank: int, node: int) -> str:
    """What was recorded at ``node`` or after the span there: "all_reduce 4,096 B on tp [0,1] (gpt.py:77 forward)"."""
    program = graph.program_of(rank)
    node = event(program.kind, node)
    if node >= len(program):
        return "the end of the recording"
    op = Op(int(program.op[node]))
    if Kind(int(program.kind[node])) is not Kind.COMM:
        return f"{Kind(int(program.kind[node])).name.lower()} ({callsite_text(graph, rank, node)})"
    number = int(graph.ranks.slots[rank][program.slot[node]])
    size = int(graph.values_of(rank).bytes[node])
    groups = graph.groups
    members = tuple(groups.members[number].tolist())
    group = Group(number, groups.name[number], groups.desc[number], groups.backend[number], members, {})
    return f"{op.name.lower()} {size:,} B on {group.label()} ({callsite_text(graph, rank, node)})"


def event(kinds: np.ndarray, node: int) -> int:
    """The first node from ``node`` on that is not a compute span; ``len(kinds)`` if there is none."""
    found = np.flatnonzero(kinds[node:] != Kind.COMPUTE)
    return node + int(found[0]) if len(found) else len(kinds)


def ordinal(graph: Graph, rank: int, node: int) -> int:
    """How many communication operations come before ``node``."""
    return int(np.count_nonzero(graph.program_of(rank).kind[:node] == Kind.COMM))


def check_operation(graph: Graph, rank: int, operation: Operation) -> None:
    """PrismError unless the recording has this operation at this place."""
    program = graph.program_of(rank)
    node = operation.node
    same = node < len(program) and program.kind[node] == Kind.COMM and program.op[node] == operation.op
    if same:
        group = graph.groups.members[int(graph.ranks.slots[rank][program.slot[node]])]
        size = sum(length for _, length in sizes(operation))
        same = tuple(group.tolist()) == operation.group.members and size == int(graph.values_of(rank).bytes[node])
    if not same:
        raise PrismError(
            f"rank {rank} diverged at operation {ordinal(graph, rank, node)}: expected {expected_text(graph, rank, node)}, "
            f"got {operation.text().rsplit(' (', 1)[0]} on {operation.group.label()} ({operation.site})"
        )


def sizes(operation: Operation) -> list[tuple[str, int]]:
    """(dtype, bytes) of each tensor of the operation."""
    from prism_tools.capture.wire import itemsize

    return [(name, count * itemsize(name)) for name, count in operation.descs]


def check_trace(graph: Graph, rank: int, trace: dict[str, Any]) -> None:
    """PrismError unless a finished rank did everything that was recorded of it, and nothing else."""
    program = graph.program_of(rank)
    columns = trace["columns"]
    count = min(len(program), len(columns["kind"]))
    differ = np.zeros(count, bool)
    for name in COMPARED:
        differ |= program.columns[name][:count] != columns[name][:count]
    if differ.any():
        node = int(np.argmax(differ))
    elif len(program) != len(columns["kind"]):
        node = count
    else:
        return
    mine = event(columns["kind"], node)
    if mine < len(columns["kind"]):
        op = Op(int(columns["op"][mine]))
        site = trace["sites"][columns["callsite"][mine]] if columns["callsite"][mine] >= 0 else "?"
        got = f"{op.name.lower() if op else Kind(int(columns['kind'][mine])).name.lower()} ({site})"
    else:
        got = "the end of the program"
    place = ordinal(graph, rank, node)
    raise PrismError(
        f"rank {rank} diverged at operation {place}: expected {expected_text(graph, rank, node)}, got {got}"
    )
