"""The likely cause of a deadlock in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import P2P, Op
from prism_tools.record.stalls import call_of

if TYPE_CHECKING:
    from prism_tools.capture.server import Operation
    from prism_tools.record.coordinator import Coordinator, Turn
    from prism_tools.record.history import Difference

SHORT = 8  # ranks of a cycle that is searched for from everywhere
SHOWN = 4  # of a longer one


def missing_ranks(coordinator: Coordinator, turn: Turn) -> list[int]:
    """The ranks that a blocked rank waits for: [] where that is not known (a store key, any source)."""
    operation = turn.operation()
    if operation is None:
        return []
    members = operation.group.members
    if operation.op in P2P:
        return [members[operation.peer]] if operation.peer >= 0 else []
    found = coordinator.open.get((operation.group.number, operation.sequence))
    if found is None:
        return []
    return [member for member, arrived in zip(members, found.arrived, strict=True) if arrived is None]


def suspicion(coordinator: Coordinator) -> str:
    """The first that is found of: a call left out, a rank that ended, one that sleeps elsewhere, a wrong tag, a cycle."""
    waiting = {n: missing_ranks(coordinator, turn) for n, turn in coordinator.turns.items()}
    for find in (_left_out, _asleep, _tags, _ended, _cycle_text, _key, _differing):
        text = find(coordinator, waiting)
        if text:
            return text
    return ""


def difference_text(found: Difference) -> str:
    """How members' calls on a group differ."""
    odd, others = _ranks(found.odd), _ranks(found.others)
    many = f" and {len(found.calls) - 1} more" if len(found.calls) > 1 else ""
    where = f"operation {found.position} of group {found.group.label()}"
    if found.kind == "skipped":
        return f"{odd} skipped {where}, {found.calls[0]}{many}, which {others} called"
    if found.kind == "added":
        return f"{odd} called {found.calls[0]}{many} as {where}, which {others} did not"
    return f"the orders differ since {where}: {odd} called {found.calls[0]}, {others} called {found.calls[1]}"


def _ranks(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {ranks_text(ranks)}"


def _left_out(coordinator: Coordinator, _: dict[int, list[int]]) -> str:
    """A call that some members of a group in which somebody waits left out, or that only they made."""
    return _order(coordinator, ("skipped", "added"))


def _differing(coordinator: Coordinator, _: dict[int, list[int]]) -> str:
    """Other lines of the program are often in order: this is the last resort."""
    return _order(coordinator, ("differs",))


def _order(coordinator: Coordinator, kinds: tuple[str, ...]) -> str:
    for open_one in coordinator.open.values():
        group = open_one.first.group
        found = coordinator.history.difference(group, list(group.members))
        if found is not None and found.kind in kinds:
            return difference_text(found)
    return ""


def _ended(coordinator: Coordinator, waiting: dict[int, list[int]]) -> str:
    for number, others in waiting.items():
        operation = coordinator.turns[number].operation()
        if operation is None:
            continue
        anybody = [member for member in operation.group.members if member != number] if _is_any(operation) else []
        gone = [other for other in others or anybody if coordinator.turns[other].state.name == "LEFT"]
        if gone and (others or gone == anybody):
            who = [n for n, missing in waiting.items() if missing == others] if others else [number]
            verb, still = ("has" if len(gone) == 1 else "have"), ("waits" if len(who) == 1 else "wait")
            return f"{_ranks(gone)} {verb} ended; {_ranks(who)} still {still} in {operation.text()}"
    return ""


def _is_any(operation: Operation) -> bool:
    """Whether it waits for a message of anybody."""
    return operation.op is Op.RECV and operation.peer < 0


def _asleep(coordinator: Coordinator, waiting: dict[int, list[int]]) -> str:
    """Ranks that are asleep outside communication, and who waits for them."""
    turns = coordinator.turns
    idle = [n for n, turn in turns.items() if turn.is_stalled() and not (turn.rank.watched or turn.asked)]
    if not idle:
        return ""
    who = [n for n, missing in waiting.items() if not set(idle).isdisjoint(missing)]
    where = f"{'is' if len(idle) == 1 else 'are'} outside communication, in {turns[idle[0]].rank.ask(call_of)[0]}"
    where += f" (rank {idle[0]})" if len(idle) > 1 else ""
    others = f"; {_ranks(who)} {'waits' if len(who) == 1 else 'wait'} for {'it' if len(idle) == 1 else 'them'}"
    return f"{_ranks(idle)} {where}{others if who else ''}"


def _tags(coordinator: Coordinator, waiting: dict[int, list[int]]) -> str:
    """A message that has come, with another tag than its receiver waits for."""
    for number in waiting:
        operation = coordinator.turns[number].operation()
        if operation is None or operation.op is not Op.RECV:
            continue
        group = operation.group
        for (in_group, receiver, tag), queue in coordinator.sends.items():
            if (in_group, receiver) == (group.number, group.index[number]):
                for source, _, sent in queue:
                    if operation.peer in (-1, source):
                        return (
                            f"rank {number} waits for tag {operation.tag} of rank {group.members[source]}, "
                            f"which sent tag {tag} at {sent.site}"
                        )
    return ""


def _cycle_text(coordinator: Coordinator, waiting: dict[int, list[int]]) -> str:
    cycle = _cycle(waiting)
    parts, operations = [], set()
    for number, other in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        operation = coordinator.turns[number].operation()
        assert operation is not None
        verb = {Op.SEND: "to receive in", Op.RECV: "to send in"}.get(operation.op, "in")
        parts.append(f"rank {number} waits for rank {other} {verb} {operation.group.label()} at {operation.site}")
        operations.add(operation.op)
    cause = "they call these operations in different orders"
    if operations == {Op.SEND}:
        cause = "each sends before it receives"
    elif operations == {Op.RECV}:
        cause = "each receives before it sends"
    if len(parts) > SHOWN:
        parts[SHOWN - 1 :] = [f"… and so on, {len(cycle)} ranks in a ring"]
    return f"{'; '.join(parts)}: {cause}" if parts else ""


def _cycle(waiting: dict[int, list[int]]) -> list[int]:
    """A short chain of ranks, each waiting for the next and the last for the first; else any such chain; [] if none."""
    best: list[int] = []
    for start in waiting:
        chain, number = [start], start
        while len(chain) <= SHORT:
            others = waiting[number]
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
    return best or _ring(waiting)


def _ring(waiting: dict[int, list[int]]) -> list[int]:
    """The ring of ranks into which the first one's waiting leads; [] if it leads nowhere."""
    seen: dict[int, int] = {}
    number = next((n for n, others in waiting.items() if others), -1)
    while number >= 0 and number not in seen:
        seen[number] = len(seen)
        number = next(iter(waiting[number]), -1)
    return list(seen)[seen[number] :] if number >= 0 else []


def _key(coordinator: Coordinator, _: dict[int, list[int]]) -> str:
    """A key that nobody set."""
    for waiter in sorted(coordinator.store.waiting.values(), key=lambda waiter: waiter.rank):
        missing = [key for key in waiter.keys if key not in coordinator.store.values]
        if missing:
            return f"rank {waiter.rank} waits for store key {missing[0]!r}, which nobody has set"
    for number, turn in coordinator.turns.items():
        if turn.polls.since and turn.operation() is None:
            return f"rank {number} polls {turn.polls.text()}, and nobody changes the answer"
    return ""
