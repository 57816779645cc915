"""The server's side of the rendezvous store: keys, waiters, and the log that replay pre-applies."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

CHANGES = ("set", "add", "append", "compare_set", "delete_key", "queue_push", "queue_pop")
EXPIRED = "expired"  # in the log: a wait with a time limit, whose first key did not come
BLOCKING = ("get", "wait", "queue_pop")


@dataclass
class Waiter:
    """Who waits for ``keys`` in ``function``; ``deadline``: CLOCK_MONOTONIC ns, if the program gave a time limit."""

    rank: int
    function: str
    keys: list[str]
    deadline: int | None = None


class KeyValue:
    """A c10d store's state. ``waiting``: by opaque tokens, released when all their keys exist."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.waiting: dict[Any, Waiter] = {}
        self.log: list[tuple[int, str, str, bytes]] = []

    def call(self, rank: int, function: str, arguments: tuple, token: Any) -> tuple[bool, Any]:
        """Apply one request: (True, answer), or (False, None) when ``token`` must wait.

        ``wait`` is answered with True, or with False when its time limit is over (``expire``); ``queue_pop`` that does not
        block with None if the queue is empty.
        """
        if function in BLOCKING:
            keys = list(arguments[0]) if function == "wait" else [arguments[0]]
            deadline = None
            if function == "wait" and arguments[1:] and arguments[1] is not None:
                deadline = time.monotonic_ns() + arguments[1]
            waiter = Waiter(rank, function, keys, deadline)
            if self._is_over(waiter):
                return True, self._answer(waiter)
            if function == "queue_pop" and not arguments[1]:
                return True, None
            self.waiting[token] = waiter
            return False, None
        old = self.values.get(arguments[0]) if function == "add" else None
        answer = getattr(self, "_" + function)(*arguments)
        if function in CHANGES and self._has_changed(function, arguments, answer, old):
            value = str(arguments[1]).encode() if function == "add" else (arguments[-1] if len(arguments) > 1 else b"")
            self.log.append((rank, function, arguments[0], value))
        return True, answer

    def _has_changed(self, function: str, arguments: tuple, answer: Any, old: bytes | None) -> bool:
        """Whether a call changed anything; an addition of 0 to ``old`` only asks, and may be asked any number of times."""
        if function == "compare_set":
            return answer == arguments[-1]
        return function != "add" or self.values[arguments[0]] != old

    def released(self) -> list[tuple[Any, Any]]:
        """The waiters whose keys all exist now, with their answers; they are forgotten."""
        answers = []
        for token, waiter in list(self.waiting.items()):
            if self._is_over(waiter):  # asked one by one: a pop may leave the next waiter's queue empty
                del self.waiting[token]
                answers.append((token, self._answer(waiter)))
        return answers

    def expire(self, token: Any) -> None:
        """A wait's time limit is over; it is forgotten."""
        waiter = self.waiting.pop(token)
        self.log.append((waiter.rank, EXPIRED, waiter.keys[0], b""))

    def _has(self, keys: list[str]) -> bool:
        return all(key in self.values or key in self.queues for key in keys)

    def _is_over(self, waiter: Waiter) -> bool:
        """Whether what it waits for is there: a queue is no value, nor the other way round."""
        if waiter.function == "wait":
            return self._has(waiter.keys)
        return waiter.keys[0] in (self.values if waiter.function == "get" else self.queues)

    def _answer(self, waiter: Waiter) -> Any:
        if waiter.function == "wait":
            return True
        if waiter.function == "get":
            return self.values[waiter.keys[0]]
        self.log.append((waiter.rank, "queue_pop", waiter.keys[0], b""))
        return self._queue_pop(waiter.keys[0])

    def apply(self, function: str, key: str, value: bytes) -> None:
        """Apply a logged change of an absent rank."""
        if function == "add":
            self._add(key, int(value))
        elif function == "append":
            self._append(key, value)
        elif function == "delete_key":
            self._delete_key(key)
        elif function == "queue_push":
            self._queue_push(key, value)
        elif function == "queue_pop":
            if key in self.queues:  # not where the order is not the recorded one
                self._queue_pop(key)
        elif function != EXPIRED:
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
        return self._has(keys)

    def _delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self.values)

    def _list_keys(self) -> list[str]:
        return list(self.values)

    def _queue_push(self, key: str, value: bytes) -> None:
        self.queues.setdefault(key, deque()).append(value)

    def _queue_pop(self, key: str) -> bytes:
        """The oldest element; a queue that is empty is none any more."""
        queue = self.queues[key]
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def _queue_len(self, key: str) -> int:
        return len(self.queues.get(key, ()))
