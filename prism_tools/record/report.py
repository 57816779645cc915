"""What to say when ranks disagree or cannot go on: who waits where and for whom, then one sentence of suspicion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prism_tools.errors import PrismError
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import P2P, ROOTED, Op
from prism_tools.graph.semantics import ignores_tags
from prism_tools.record.polls import PATIENCE
from prism_tools.record.stalls import call_of
from prism_tools.record.suspicion import difference_text, missing_ranks, suspicion

if TYPE_CHECKING:
    from prism_tools.capture.server import Operation
    from prism_tools.record.coordinator import Collective, Coordinator, Turn

ROWS = 12  # rows of the table; a thousand ranks wait in few different places
COLUMNS = ("rank", "waits in", "group", "op#", "since", "for ranks", "at")


class _Row:
    """Ranks that wait in one place. ``groups``: labels of their groups; ``missing``: whom they wait for."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.groups: set[str] = set()
        self.missing: set[int] = set()
        self.issued = 0


def deadlock(coordinator: Coordinator) -> PrismError:
    """What to raise when no rank can run."""
    detail = "\n".join(filter(None, [deadlock_table(coordinator), suspicion(coordinator)]))
    return PrismError("deadlock: no rank can run", detail=detail)


def deadlock_table(coordinator: Coordinator) -> str:
    """One row for the ranks that wait in the same place for the same ranks; if that is many rows, for ranks at a line."""
    blocked = [turn for turn in coordinator.turns.values() if turn.state.name == "BLOCKED" or turn.polls.since]
    rows = _rows(coordinator, blocked, exact=True)
    if len(rows) > ROWS:
        rows = _rows(coordinator, blocked, exact=False)
    left = [n for n, turn in coordinator.turns.items() if turn.state.name == "LEFT"]
    table: list[tuple[str, ...]] = [COLUMNS]
    for (what, _, sequence, nobody, site), row in list(rows.items())[:ROWS]:
        since = f"{(time.monotonic_ns() - row.issued) / 1e9:.1f} s" if row.issued else "-"
        group = f"{len(row.groups)} groups" if len(row.groups) > 1 else row.groups.pop()
        missing = ranks_text(row.missing) if row.missing else nobody
        table.append((ranks_text(row.ranks), what, group, sequence, since, missing, site))
    if left:
        table.append((ranks_text(left), "-", "-", "-", "-", "-", "program ended"))
    widths = [max(len(row[k]) for row in table) for k in range(len(COLUMNS))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    if len(rows) > ROWS:
        lines.append(f"  and {len(rows) - ROWS} more places")
    return "\n".join(line.rstrip() for line in lines)


def _rows(coordinator: Coordinator, turns: list[Turn], exact: bool) -> dict[tuple[str, ...], _Row]:
    """Rows by (what, group and missing ranks, op#, text for no missing ranks, site); not ``exact``: groups that differ
    only in their members, and ranks that wait for different ones, share a row."""
    rows: dict[tuple[str, ...], _Row] = {}
    for turn in turns:
        operation, issued = turn.operation(), 0
        if operation is None:
            missing, group = [], "-"
            asleep = coordinator.stalls.asleep_for(turn.rank.number)
            issued = time.monotonic_ns() - int(asleep * 1e9) if asleep else int(turn.polls.since * 1e9)
            key = (place_of(coordinator, turn)[0], "", "-", "-", place_of(coordinator, turn)[1])
        else:
            missing, group, issued = missing_ranks(coordinator, turn), operation.group.label(), operation.issued
            sequence = str(operation.sequence) if operation.op not in P2P else "-"
            apart = f"{group} {missing}" if exact else ""
            key = (_call(operation), apart, sequence, "any", operation.site)
        row = rows.setdefault(key, _Row())
        row.ranks.append(turn.rank.number)
        row.groups.add(group)
        row.missing.update(missing)
        row.issued = min(filter(None, (row.issued, issued)), default=0)
    return rows


def _call(operation: Operation) -> str:
    tagged = operation.op in P2P and operation.tag > 0 and not ignores_tags(operation.group.backend)
    tag = f" tag {operation.tag}" if tagged else ""
    return operation.text().rsplit(" (", 1)[0] + tag


def place_of(coordinator: Coordinator, turn: Turn) -> tuple[str, str]:
    """Where a rank waits that waits for no operation of its own: in what, and after which call."""
    site = f"after {turn.last.site}" if turn.last else "before its first operation"
    if turn.polls.since:
        return turn.polls.text(), site
    for waiter in coordinator.store.waiting.values():
        if waiter.rank == turn.rank.number:
            return f"store key {waiter.keys[0]!r}", site
    if turn.rank.watched or turn.asked:
        return "C++ (a Future)", site
    return turn.rank.ask(call_of)[0], site


def notices(coordinator: Coordinator, numbers: list[int]) -> list[str]:
    """One line for the ranks that sleep in one place outside communication."""
    places: dict[tuple[str, str], list[int]] = {}
    for number in numbers:
        places.setdefault(place_of(coordinator, coordinator.turns[number]), []).append(number)
    return [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {ranks_text(ranks)} outside communication in {what}, {site}; "
        "other ranks run meanwhile"
        for (what, site), ranks in places.items()
    ]


def poll_notice(coordinator: Coordinator, turns: list[Turn]) -> str:
    """One line for the ranks that alone can run, and only ask in vain."""
    operation, (what, site) = turns[0].operation(), place_of(coordinator, turns[0])
    who = ranks_text(turn.rank.number for turn in turns)
    asked = operation.text() if operation else f"{what}, {site}"
    return f"no rank can run but {who}, polling {asked}; given up {PATIENCE:.0f} s after the first time"


def check_match(coordinator: Coordinator, found: Collective, number: int, operation: Operation) -> None:
    """PrismError if this member calls something else than the first one did."""
    first = found.first
    same = first.op is operation.op and first.reduce is operation.reduce
    same = same and (first.op not in ROOTED or first.root == operation.root)
    if first.op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        same = same and first.descs == operation.descs
    if same:
        return
    group, sequence = first.group, operation.sequence
    here = [member for member, arrived in zip(group.members, found.arrived, strict=True) if arrived is not None]
    who = f"rank {here[0]}" if len(here) == 1 else f"ranks {ranks_text(here)}"
    calls = [_call_and_root(operation, first), _call_and_root(first, operation)]
    detail = ""
    earlier = coordinator.history.difference(group, [*here, number])
    if earlier is not None and earlier.position < sequence:
        detail = difference_text(earlier)
    elif sequence:
        detail = f"they agreed until operation {sequence - 1}, {coordinator.history.name(group, number, sequence - 1)}"
    raise PrismError(
        f"mismatched collective: operation {sequence} of group {group.label()}: "
        f"rank {number} calls {calls[0]}, {who} called {calls[1]}",
        detail=detail,
    )


def _call_and_root(operation: Operation, other: Operation) -> str:
    """The call as text, with what else differs where the text would be the same."""
    extra = []
    if operation.op is other.op and operation.root != other.root and operation.op in ROOTED:
        extra.append(f" from root {operation.group.members[operation.root]}")
    if operation.op is other.op and operation.reduce is not other.reduce:
        extra.append(f" {operation.reduce.name.lower()}")
    what, place = operation.text().rsplit(" (", 1)
    return what + "".join(extra) + " (" + place
