"""What absent ranks change in the rendezvous store, in the recording's order among what the sandbox changes."""

from __future__ import annotations

from collections import Counter

from prism_tools.capture.kv import EXPIRED, KeyValue
from prism_tools.graph.model import StoreLog

IGNORED = ("delete_key",)  # a key that an absent rank removes later may still be wanted by a sandbox rank now


class AbsentChanges:
    """Applies an absent rank's change once the sandbox has made the changes that came before it in the recording.

    So a key that an absent rank set when it had seen the sandbox's does not appear before those. Only counters are moved at
    once: whoever comes last must see the whole count, and in a replay that is a sandbox rank.
    """

    def __init__(self, log: StoreLog, sandbox: list[int], store: KeyValue) -> None:
        self._rows: list[tuple[int, str, str, bytes]] = []
        for row in zip(log.rank.tolist(), log.op, log.key, log.value, strict=True):
            if row[0] in sandbox:
                self._rows.append(row)
            elif row[1] == "add":
                store.apply(*row[1:])
            elif row[1] not in IGNORED:
                self._rows.append(row)
        self._sandbox = frozenset(sandbox)
        self._store = store
        self._made: Counter[tuple[int, str, str]] = Counter()
        self._limits = Counter((rank, key) for rank, op, key, _ in self._rows if op == EXPIRED)
        self._next = 0
        self.apply()

    def made(self, rank: int, function: str, key: str) -> None:
        """A sandbox rank has changed ``key``."""
        self._made[rank, function, key] += 1
        self.apply()

    def expires(self, rank: int, key: str) -> bool:
        """Whether a sandbox rank's wait for ``key``, which is not there, comes to its time limit, as in the recording."""
        if not self._limits[rank, key]:
            return False
        self._limits[rank, key] -= 1
        self.made(rank, EXPIRED, key)
        return True

    def apply(self, everything: bool = False) -> None:
        """Apply what is due; ``everything``: also what comes after changes that the sandbox has not made."""
        while self._next < len(self._rows):
            rank, function, key, value = self._rows[self._next]
            if rank not in self._sandbox:
                self._store.apply(function, key, value)
            elif self._made[rank, function, key]:
                self._made[rank, function, key] -= 1
            elif not everything:
                return
            self._next += 1
