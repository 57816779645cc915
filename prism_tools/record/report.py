"""What to say when no rank can run: who waits where and for whom, then one sentence of suspicion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prism_tools.graph.schema import P2P, Op
from prism_tools.graph.semantics import ignores_tags

if TYPE_CHECKING:
    from prism_tools.capture.server import Operation
    from prism_tools.record.coordinator import Coordinator, Turn

ROWS = 24  # rows of the table; a thousand ranks wait in few different places
COLUMNS = ("rank", "waits in", "group", "op#", "since", "for ranks", "at")


def rank_list(numbers: list[int]) -> str:
    """Ranks as Slurm writes them: [0, 1, 2, 8] → "0-2,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def operation_of(turn: Turn) -> Operation | None:
    """The operation that a blocked rank waits for."""
    return turn.issued.get(turn.waits)


def missing_ranks(coordinator: Coordinator, turn: Turn) -> list[int]:
    """The ranks that a blocked rank waits for: [] where that is not known (a store key, any source)."""
    operation = operation_of(turn)
    if operation is None:
        return []
    members = operation.group.members
    if operation.op in P2P:
        return [members[operation.peer]] if operation.peer >= 0 else []
    for found in coordinator.open.values():
        me = found.first.group.index.get(turn.rank.number, -1)
        if me >= 0 and found.arrived[me] == (turn.rank.number, operation.opid):
            return [member for member, arrived in zip(members, found.arrived, strict=True) if arrived is None]
    return []


def deadlock_table(coordinator: Coordinator) -> str:
    """One row for the ranks that wait in the same place for the same ranks."""
    rows: dict[tuple[str, ...], list[int]] = {}
    issued: dict[tuple[str, ...], int] = {}
    for number, turn in coordinator.turns.items():
        if turn.state.name == "BLOCKED":
            row = _row(coordinator, turn)
            rows.setdefault(row, []).append(number)
            operation = operation_of(turn)
            if operation is not None:
                issued[row] = min(operation.issued, issued.get(row, operation.issued))
    left = [n for n, turn in coordinator.turns.items() if turn.state.name == "LEFT"]
    table: list[tuple[str, ...]] = [COLUMNS]
    for row, numbers in list(rows.items())[:ROWS]:
        since = f"{(time.monotonic_ns() - issued[row]) / 1e9:.1f} s" if row in issued else "-"
        table.append((rank_list(numbers), *row[:3], since, *row[3:]))
    if left:
        table.append((rank_list(left), "-", "-", "-", "-", "-", "program ended"))
    widths = [max(len(row[k]) for row in table) for k in range(len(COLUMNS))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    if len(rows) > ROWS:
        lines.append(f"  and {len(rows) - ROWS} more places")
    return "\n".join(line.rstrip() for line in lines)


def _row(coordinator: Coordinator, turn: Turn) -> tuple[str, ...]:
    """Where a rank waits: the table's columns without "rank" and "since", which ranks in one place do not share."""
    operation = operation_of(turn)
    if operation is None:
        keys = next((w[0] for t, w in coordinator.store.waiting.items() if t[0] == turn.rank.number), None)
        place = turn.last.site if turn.last else "before its first operation"
        what = f"store key {keys[0]!r}" if keys else "C++ (a Future)"
        return (what, "-", "-", "-", f"after {place}" if turn.last else place)
    missing = rank_list(missing_ranks(coordinator, turn)) or "any"
    sequence = str(coordinator.counts.get((operation.group.number, turn.rank.number), 0) - 1)
    tag = ""
    if operation.op in P2P:
        sequence = "-"
        if operation.tag > 0 and not ignores_tags(operation.group.backend):
            tag = f" tag {operation.tag}"
    what = operation.text().rsplit(" (", 1)[0] + tag
    return (what, operation.group.label(), sequence, missing, operation.site)


def suspicion(coordinator: Coordinator) -> str:
    """The likely cause in one sentence: a rank that ended, or a cycle of ranks waiting for each other."""
    for number, turn in coordinator.turns.items():
        for other in missing_ranks(coordinator, turn):
            if coordinator.turns[other].state.name == "LEFT":
                operation = operation_of(turn)
                assert operation is not None
                return f"rank {other} has ended; rank {number} still waits for its {operation.text()}"
    cycle = _cycle(coordinator)
    if not cycle:
        return ""
    parts, operations = [], set()
    for number, other in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        operation = operation_of(coordinator.turns[number])
        assert operation is not None
        verb = {Op.SEND: "to receive in", Op.RECV: "to send in"}.get(operation.op, "in")
        parts.append(f"rank {number} waits for rank {other} {verb} {operation.group.label()} at {operation.site}")
        operations.add(operation.op)
    cause = (
        "each sends before it receives" if operations == {Op.SEND} else "they call these operations in different orders"
    )
    return "; ".join(parts) + f": {cause}"


def _cycle(coordinator: Coordinator) -> list[int]:
    """A shortest chain of ranks, each waiting for the next and the last for the first; [] if none was found."""
    best: list[int] = []
    for start in coordinator.turns:
        chain, number = [start], start
        while len(chain) <= 8:
            others = missing_ranks(coordinator, coordinator.turns[number])
            if start in others:
                if not best or len(chain) < len(best):
                    best = chain
                break
            number = next((other for other in others if other not in chain), -1)
            if number < 0:
                break
            chain.append(number)
        if len(best) == 2:
            break
    return best
