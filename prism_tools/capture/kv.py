"""The server's side of the rendezvous store: keys, waiters, and the log that replay pre-applies."""

from __future__ import annotations

from typing import Any

CHANGES = ("set", "add", "append", "compare_set", "delete_key")


class KeyValue:
    """A c10d store's state. ``waiters`` are opaque tokens released when all their keys exist."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: dict[Any, tuple[list[str], bool]] = {}
        self.log: list[tuple[int, str, str, bytes]] = []

    def call(self, rank: int, function: str, arguments: tuple, token: Any) -> tuple[bool, Any]:
        """Apply one request: (True, answer), or (False, None) when ``token`` must wait (``wait`` and ``get``)."""
        if function in ("get", "wait"):
            keys = [arguments[0]] if function == "get" else list(arguments[0])
            if all(key in self.values for key in keys):
                return True, self.values[keys[0]] if function == "get" else None
            self.waiting[token] = (keys, function == "get")
            return False, None
        answer = getattr(self, "_" + function)(*arguments)
        if function in CHANGES and (function != "compare_set" or answer == arguments[-1]):
            value = str(arguments[1]).encode() if function == "add" else (arguments[-1] if len(arguments) > 1 else b"")
            self.log.append((rank, function, arguments[0], value))
        return True, answer

    def released(self) -> list[tuple[Any, Any]]:
        """The waiters whose keys all exist now, with their answers; they are forgotten."""
        ready = [token for token, (keys, _) in self.waiting.items() if all(key in self.values for key in keys)]
        answers = []
        for token in ready:
            keys, is_get = self.waiting.pop(token)
            answers.append((token, self.values[keys[0]] if is_get else None))
        return answers

    def apply(self, function: str, key: str, value: bytes) -> None:
        """Apply a logged change of an absent rank."""
        if function == "add":
            self._add(key, int(value))
        elif function == "append":
            self._append(key, value)
        elif function == "delete_key":
            self._delete_key(key)
        else:
            self.values[key] = value

    def _set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def _add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def _append(self, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self.values.get(key)
        if (current is None and not expected) or current == expected:
            self.values[key] = current = desired
        return current if current is not None else expected

    def _check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def _delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self.values)
