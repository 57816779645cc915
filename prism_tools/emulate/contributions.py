"""What sandbox ranks have brought to operations that cross, and what they are sent at the end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Generic, Protocol, TypeVar

from prism_tools.capture import wire
from prism_tools.capture.server import Operation
from prism_tools.graph.match import Matches


class Contribution(Protocol):
    """What is needed of a sandbox member's operation for the results of others."""

    descs: list[tuple[str, int]]
    has_input: bool
    payload: memoryview


Call = TypeVar("Call")


class Calls(Generic[Call]):
    """Calls of sandbox ranks by match, each until all of the ranks ``ours`` that take part have their results."""

    def __init__(self, matches: Matches, ours: Collection[int]) -> None:
        self._matches, self._ours = matches, frozenset(ours)
        self._of: dict[int, dict[int, Call]] = {}
        self._answered: dict[int, int] = {}

    def add(self, match: int, rank: int, call: Call) -> None:
        """A rank has come."""
        self._of.setdefault(match, {})[rank] = call

    def of(self, match: int) -> dict[int, Call]:
        """By rank."""
        return self._of.get(match, {})

    def answered(self, match: int) -> bool:
        """One more of ours has its results; whether it was the last."""
        self._answered[match] = self._answered.get(match, 0) + 1
        last = self._answered[match] == sum(rank in self._ours for rank in ranks_of(self._matches, match))
        if last:
            del self._of[match], self._answered[match]
        return last


def ranks_of(matches: Matches, match: int) -> list[int]:
    """The match's members."""
    return [matches.rank_of(member) for member in matches.members[match].tolist()]


def completion(operation: Operation, outs: list[Any], ending: tuple[str, int, int]) -> tuple[tuple, wire.Parcel]:
    """The operation's end as its rank is told it; ``ending``: why it is refused or "", when on the rank's clock, the sender."""
    refused, when, source = ending
    what = ("failed", operation.opid, refused) if refused else ("done", operation.opid, wire.descs_of(outs))
    return (*what, when, source), wire.pack(outs)
