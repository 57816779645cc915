"""The payload store: one file with every recorded contribution, found by (rank, node); equal contents are stored once.

Layout: 8 bytes magic, 16 bytes UUID, contents, index (rows rank, node, offset, length: int64), 16 bytes (index offset, rows).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import uuid as uuid_module
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.model import Payload

MAGIC = b"PRISMPL1"
FOOTER = struct.Struct("<QQ")


class PayloadWriter:
    """Appends contributions to a temporary file beside ``path``; ``finish`` completes and ``commit`` renames it.

    ``discard`` removes what was not committed.

    Beyond ``budget`` bytes only essential contributions are kept; ``lost`` counts the bytes that were not.
    """

    def __init__(self, path: str, budget: int) -> None:
        self.path = os.path.abspath(path)
        self.budget = budget
        self.uuid = uuid_module.uuid4()
        self.lost = 0
        folder, name = os.path.split(self.path)
        try:
            self._temporary = os.path.join(folder, f".{name}.prism-{self.uuid.hex[:8]}.tmp")
            handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise PrismError(f"{path}: cannot write here: {error.strerror}") from error
        self._file = os.fdopen(handle, "wb", buffering=1 << 20)
        self._file.write(MAGIC + self.uuid.bytes)
        self.size = len(MAGIC) + 16
        self._index = array("q")  # rank, node, offset, length
        self._known: dict[bytes, int] = {}

    def add(self, rank: int, node: int, data: Any, essential: bool = False) -> None:
        """Keep one contribution; ``essential``: whatever the budget. PrismError if the disk is full."""
        length = len(data)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        offset = self._known.get(digest)
        if offset is None:
            if not essential and self.size + length > self.budget:
                self.lost += length
                return
            offset = self._known[digest] = self.size
            self._write(data)
            self.size += length
        self._index.extend((rank, node, offset, length))

    def finish(self) -> Payload:
        """Write the rest and describe the file, which ``commit`` then puts under its own name."""
        index = np.array(self._index, np.int64).reshape(-1, 4)
        index = index[np.lexsort((index[:, 1], index[:, 0]))]
        self._write(index.tobytes())
        self._write(FOOTER.pack(self.size, len(index)))
        try:
            self._file.close()
        except OSError as error:
            self.discard()
            raise PrismError(f"{self.path}: {error.strerror}; free some space or use --tensors none") from error
        mode = ("partial" if self.budget else "none") if self.lost else "all"
        return Payload(uuid=str(self.uuid), path=self.path, mode=mode, bytes=self.size)

    def commit(self) -> None:
        """Replace the store of an older recording, once the graph has replaced the older graph."""
        try:
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise PrismError(f"{self.path}: cannot write here: {error.strerror}") from error

    def discard(self) -> None:
        """Remove the temporary file."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk: what could not be flushed is thrown away with the file
        Path(self._temporary).unlink(missing_ok=True)

    def _write(self, data: Any) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise PrismError(f"{self.path}: {error.strerror}; free some space or use --tensors none") from error


class PayloadReader:
    """Random access to a payload store: the one of its name in folder ``beside`` (the graph's own), else at its last path."""

    def __init__(self, payload: Payload, beside: str = "") -> None:
        near = os.path.join(beside, os.path.basename(payload.path)) if beside else ""
        path = near if near and os.path.exists(near) else payload.path
        try:
            with open(path, "rb") as file:
                self._map = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
        except (OSError, ValueError) as error:
            raise PrismError(f"{path}: cannot read the recorded payloads; record again or restore the file") from error
        head = len(MAGIC) + 16
        if bytes(self._map[: len(MAGIC)]) != MAGIC or len(self._map) < head + FOOTER.size:
            raise PrismError(f"{path}: not a payload store")
        if str(uuid_module.UUID(bytes=bytes(self._map[len(MAGIC) : head]))) != payload.uuid:
            raise PrismError(f"{path}: belongs to another recording; record again")
        start, rows = FOOTER.unpack(self._map[-FOOTER.size :])
        if start + rows * 32 + FOOTER.size != len(self._map):
            raise PrismError(f"{path}: truncated payload store; record again")
        index = np.frombuffer(self._map, np.int64, rows * 4, start).reshape(-1, 4)
        if (index[:, 2:] < 0).any() or (index[:, 3] > start - index[:, 2]).any():
            raise PrismError(f"{path}: damaged payload store; record again")
        self._where = {(rank, node): (offset, length) for rank, node, offset, length in index.tolist()}

    def get(self, rank: int, node: int) -> memoryview | None:
        """The contribution's bytes, or None where it was not kept."""
        where = self._where.get((rank, node))
        return None if where is None else self._map[where[0] : where[0] + where[1]]
