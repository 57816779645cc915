"""Which collectives each rank has called on each group, in order, and since when the members' orders differ."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import numpy as np

from prism_tools.capture.server import Group, Operation

SHIFT = 8  # calls that a rank may have left out, or made too often, and still be understood
TRIES = 64  # places at which that is looked for


@dataclass
class Difference:
    """``odd`` ranks left out, added or replaced ``calls`` ("all_reduce (train.py:41 step)") of a group, from ``position`` on.

    ``kind``: "skipped" (the others made these calls), "added" (only the odd ranks did), or "differs" (the odd ranks'
    call, then the others').
    """

    group: Group
    position: int
    odd: list[int]
    others: list[int]
    kind: str
    calls: list[str]


class History:
    """Four bytes for each collective and member."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._calls: dict[tuple[int, int], array[int]] = {}  # (group, rank) → numbers of names

    def add(self, rank: int, operation: Operation) -> int:
        """Note a collective; returns its place in the rank's sequence on its group, from 0."""
        key = (int(operation.op), operation.site)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._names)
            self._names.append(f"{operation.op.name.lower()} ({operation.site})")
        calls = self._calls.setdefault((operation.group.number, rank), array("i"))
        calls.append(number)
        return len(calls) - 1

    def name(self, group: Group, rank: int, position: int) -> str:
        """A call of the rank's on the group: "all_reduce (train.py:41 step)"."""
        return self._names[self._calls[group.number, rank][position]]

    def difference(self, group: Group, members: list[int]) -> Difference | None:
        """Where these members' orders part: a call that some left out or added, else where they differ to the end."""
        calls = [np.array(self._calls.get((group.number, rank), ()), np.int32) for rank in members]
        shortest = min(len(own) for own in calls)
        if not shortest:
            return None
        table = np.stack([own[:shortest] for own in calls])
        differs = (table != table[0]).any(0)
        starts = np.flatnonzero(differs & ~np.concatenate([[False], differs[:-1]]))
        for position in starts[:TRIES].tolist():
            found = self._explain(group, members, calls, position)
            if found is not None:
                return found
        if not differs[-1]:
            return None
        position = int(starts[-1])
        odd, usual = _parted(calls, position)
        texts = [self._names[table[member[0], position]] for member in (odd, usual)]
        return self._found(group, members, odd, position, "differs", texts)

    def _explain(self, group: Group, members: list[int], calls: list[np.ndarray], position: int) -> Difference | None:
        """Whether the odd members go on like the others, some calls earlier or later."""
        odd, usual = _parted(calls, position)
        theirs = calls[max(usual, key=lambda member: len(calls[member]))]
        own = [calls[member] for member in odd]
        for shift in range(1, SHIFT + 1):
            if all(_alike(one[position:], theirs[position + shift :]) for one in own):
                made = theirs[position : position + shift]
                return self._found(group, members, odd, position, "skipped", [self._names[call] for call in made])
            if all(_alike(one[position + shift :], theirs[position:]) for one in own):
                made = own[0][position : position + shift]
                return self._found(group, members, odd, position, "added", [self._names[call] for call in made])
        return None

    def _found(
        self, group: Group, members: list[int], odd: list[int], position: int, kind: str, texts: list[str]
    ) -> Difference:
        ranks = [members[place] for place in odd]
        return Difference(group, position, ranks, sorted(set(members) - set(ranks)), kind, texts)


def _parted(calls: list[np.ndarray], position: int) -> tuple[list[int], list[int]]:
    """Places of the members whose call is not the usual one, and of those whose is; a tie goes to the first member."""
    values = [int(own[position]) for own in calls]
    usual = Counter(values).most_common(1)[0][0]
    return [k for k, v in enumerate(values) if v != usual], [k for k, v in enumerate(values) if v == usual]


def _alike(own: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two sequences are one as far as both go, and both go somewhere."""
    length = min(len(own), len(theirs))
    return length > 0 and bool((own[:length] == theirs[:length]).all())
