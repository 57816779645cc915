"""A recording whose ranks run alone, because rules say what they receive: no rank waits for another (P§5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from prism_tools.capture import ranks, wire
from prism_tools.capture.ruled import INVENTED, UNRULED
from prism_tools.capture.server import Operation, Rank
from prism_tools.errors import PrismError
from prism_tools.graph.classes import classes_of
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Graph
from prism_tools.record.coordinator import Coordinator
from prism_tools.record.turns import State
from prism_tools.tensors.rules import Rules

COLUMNS = ("rule", "answer", "operation", "group", "dtype", "bytes", "times", "at")


class Alone(Coordinator):
    """Forks a rank when there is room for it. ``answered``: what each rule answered, all ranks together."""

    waiting: deque[ranks.Spec]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting = deque()
        self.inside: set[int] = set()  # ranks that have begun, and not left
        self.answered: dict[tuple, list[int]] = {}
        self.memberships: dict[int, tuple] = {}  # rank → every group that it saw made: (name, ranks)

    def run_all(self, specs: Iterable[ranks.Spec], tick: Callable[[], None]) -> None:
        """Run these ranks, the first ones first, until all have left. PrismError: as for Coordinator.run."""
        self.waiting.extend(specs)
        self.admit()
        self.run(tick)

    def admit(self) -> None:
        """Fork ranks while there is room. One that asks in vain for what another may bring takes none."""
        if not self.waiting:
            return
        turns = [self.turns[number] for number in self.inside]
        room = self.turns.slots - sum(t.state in (State.READY, State.ACTIVE) and not t.polls.since for t in turns)
        for _ in range(min(room, len(self.waiting))):
            spec = self.waiting.popleft()
            self.inside.add(spec.rank)
            self.launch(spec)

    def running(self) -> bool:
        return super().running() or bool(self.waiting)

    def _anyone_leaving(self) -> bool:
        return bool(self.waiting) or super()._anyone_leaving()

    def handle(self, rank: Rank, peer: wire.Peer, message: tuple, payload: memoryview, fds: list[int]) -> None:
        if message[0] == "refused":
            raise PrismError(message[1])
        super().handle(rank, peer, message, payload, fds)

    def on_op(self, rank: Rank, peer: wire.Peer, operation: Operation) -> None:
        """The rank has its results already."""
        self.keep(rank, operation)

    def on_leave(self, rank: Rank, peer: wire.Peer) -> None:
        self.inside.discard(rank.number)
        if rank.trace is not None:
            known = rank.trace["memberships"] = tuple(rank.trace["memberships"])
            self.memberships[rank.number] = self.shared.other(known)
            for row, (times, least, most) in rank.trace["answered"].items():
                seen = self.answered.setdefault(row, [0, least, most])
                seen[:] = [seen[0] + times, min(seen[1], least), max(seen[2], most)]
        super().on_leave(rank, peer)


def misfit(graph: Graph) -> str:
    """The first operation that lacks partners, and how many more do; "" if all that ranks did alone fits together."""
    alike = classes_of(graph, np.zeros(graph.world_size, np.int64))
    problems = find_matches(graph, strict=False, classes=alike).problems
    if not problems:
        return ""
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    return f"what ranks did alone does not fit together: {problems[0]}{more}; see prism-inspect check"


def unanswered(answered: dict[tuple, list[int]]) -> int:
    """How many operations no rule answers, though they need one."""
    return sum(seen[0] for row, seen in answered.items() if row[0] == UNRULED)


def explanation(rules: Rules, answered: dict[tuple, list[int]]) -> str:
    """A table: which rule answered which operations, in the order of the file; rules that answered nothing come last."""
    table = [COLUMNS]
    for row in sorted(answered, key=lambda row: (row[0] < 0, row)):
        index, operation, group, dtype, site = row
        times, least, most = answered[row]
        size = f"{least:,}" if least == most else f"{least:,}-{most:,}"
        rule = rules.rules[index] if index >= 0 else None
        who = (f"line {rule.line}", rule.generator.text) if rule else ("-", "self" if index == INVENTED else "NO RULE")
        table.append((*who, operation, group, dtype, size, f"{times:,}", site))
    used = {row[0] for row in answered}
    for k, rule in enumerate(rules.rules):
        if k not in used:
            table.append((f"line {rule.line}", rule.generator.text, "nothing", "-", "-", "-", "0", "-"))
    widths = [max(len(row[k]) for row in table) for k in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "\n".join(lines)
