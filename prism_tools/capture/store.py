"""The rendezvous store inside a rank: every call is a request to the server, so that waiting for a key is a scheduling point."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from prism_tools.capture.client import Client

# Torch's own stores wait this long; ours ends earlier when the server finds that no rank can run.
DEFAULT_TIMEOUT = timedelta(minutes=30)


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
        return self._ask("check", list(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def num_keys(self) -> int:
        return self._ask("num_keys")

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
