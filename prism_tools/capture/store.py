"""The rendezvous store inside a rank: every call is a request to the server, so that waiting for a key is a scheduling point."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from prism_tools.capture.client import Client

# Torch's own stores wait this long; ours ends earlier when the server finds that no rank can run.
DEFAULT_TIMEOUT = timedelta(minutes=30)
MILLISECOND = timedelta(milliseconds=1)


def as_bytes(value: str | bytes) -> bytes:
    """Stores hold bytes; programs may pass text."""
    return value.encode() if isinstance(value, str) else bytes(value)


class PrismStore(dist.Store):
    """Stands where a TCPStore or FileStore would, in every rank."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._timeout = DEFAULT_TIMEOUT

    def _ask(self, function: str, *arguments: Any) -> Any:
        return self._client.request(("store", function, arguments))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, as_bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, int(amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", key, as_bytes(expected), as_bytes(desired))

    def check(self, keys: list[str]) -> bool:
        if _asked.get(threading.get_ident(), 0) is None:
            _asked[threading.get_ident()] = keys[0]
            return True
        return self._ask("check", list(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = None if timeout is None else int(timeout.total_seconds() * 1e9)
        if not self._ask("wait", list(keys), limit):
            assert timeout is not None
            if not self._client.announce:  # played ranks share their time with real ones
                time.sleep(timeout.total_seconds())
            raise dist.DistStoreError(f"wait timeout after {timeout // MILLISECOND}ms, keys: /{', /'.join(keys)}")

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def num_keys(self) -> int:
        return self._ask("num_keys")

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what a PrefixStore looks for

    def list_keys(self) -> list[str]:
        return self._ask("list_keys")

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask("queue_push", key, as_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        found = self._ask("queue_pop", key, block)
        if found is None:
            raise dist.QueueEmptyError("queue is empty")
        return found

    def queue_len(self, key: str) -> int:
        return self._ask("queue_len", key)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if self.add(f"{key}/num_members", 1) == world_size:  # as torch's own, which a PrefixStore calls
            self.set(f"{key}/last_member", "1")
        self.wait([f"{key}/last_member"], timeout)

    def clone(self) -> PrismStore:
        """Each thread has a line of its own to the server, so one store serves them all."""
        return self

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


_asked: dict[int, str | None] = {}  # by thread: where a key of a PrefixStore is noted


def full_key(store: dist.PrefixStore, key: str) -> str:
    """``key`` as it is in the store below, which torch tells to nobody but that store."""
    _asked[threading.get_ident()] = None
    store.check([key])
    return _asked.pop(threading.get_ident()) or key


def serve_prefixes() -> None:
    """Let every PrefixStore above a PrismStore do what torch hands on in C++ only, to stores of its own."""
    for name in ("queue_push", "queue_pop", "queue_len", "list_keys"):
        setattr(dist.PrefixStore, name, _through(name, getattr(dist.PrefixStore, name)))


def _through(name: str, original: Callable) -> Callable:
    def method(self: dist.PrefixStore, *arguments: Any, **more: Any) -> Any:
        below = self._underlying_non_prefix_store
        if not isinstance(below, PrismStore):
            return original(self, *arguments, **more)
        if name == "list_keys":
            prefix = full_key(self, "")
            return [key.removeprefix(prefix) for key in below.list_keys() if key.startswith(prefix)]
        key = more.pop("key") if "key" in more else arguments[0]
        return getattr(below, name)(full_key(self, key), *arguments[1:], **more)

    return method
