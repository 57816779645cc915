"""The payload store: one file with every recorded contribution, found by (rank, node); equal contents are stored once.

Layout: 8 bytes magic, 16 bytes UUID, contents (tensors/codec.py), three tables (BLOB, ENTRY, SUMMARY), FOOTER. The writer only
appends.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import struct
import uuid as uuid_module
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.model import Payload
from prism_tools.tensors.codec import decode, encode
from prism_tools.tensors.digest import digest

MAGIC = b"PRISMPL2"
HEAD = len(MAGIC) + 16
FOOTER = struct.Struct("<QQQQ16s")  # where the tables begin, rows of each, their checksum
BLOB = np.dtype([("offset", "<i8"), ("stored", "<i8"), ("length", "<i8"), ("codec", "<i8"), ("sum", "u1", 16)])
ENTRY = np.dtype([("rank", "<i4"), ("node", "<i4"), ("content", "<i8")])  # row of BLOB; -1 - row of SUMMARY
SUMMARY = np.dtype(
    [("length", "<i8"), ("dtype", "<i8"), ("tensors", "<i8"), ("elements", "<i8"), ("nans", "<i8")]
    + [("minimum", "<f8"), ("maximum", "<f8"), ("mean", "<f8"), ("sum", "u1", 16)]
)
LOADED = 1 << 30  # bytes of contents that a reader holds ready
Place = tuple[int, int]  # rank, node


def checksum(data: Any) -> bytes:
    """16 bytes that no other contents have."""
    return hashlib.blake2b(data, digest_size=16).digest()


class PayloadWriter:
    """Appends contributions to a temporary file beside ``path``; ``finish`` completes and ``commit`` renames it.

    ``discard`` removes what was not committed; what a killed writer of the same path left is removed by the next one:
    a whole store, to which the graph may belong (PayloadReader finds it), not before ``commit`` replaces that graph's.
    When the file would grow beyond ``budget`` bytes, new contents are from then on summaries only, unless they are
    essential: ``lost`` is their size in bytes, ``summarised`` where they belong.
    """

    def __init__(self, path: str, budget: int) -> None:
        self.path = os.path.abspath(path)
        self.budget = budget
        self.uuid = uuid_module.uuid4()
        self.lost = 0
        self.summarised: list[Place] = []
        self._full = False
        if os.path.isdir(self.path):  # nothing could replace it at the end
            raise PrismError(f"{path}: is a folder; payloads are kept in a file of this name, move it away")
        _remove_orphans(self.path, whole=False)
        try:
            self._temporary = _uncommitted(self.path, str(self.uuid))
            handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise PrismError(f"{path}: cannot write here: {error.strerror}") from error
        self._file = os.fdopen(handle, "wb", buffering=1 << 20)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows that this process, not a fork, still writes
        except OSError:
            pass  # a file system without locks: nobody takes the file away either
        self._file.write(MAGIC + self.uuid.bytes)
        self.size = HEAD
        self._blobs: list[tuple] = []
        self._entries: list[tuple] = []
        self._summaries: list[tuple] = []
        self._known: dict[bytes, int] = {}

    def add(self, place: Place, descs: list[tuple[str, int]], data: Any, essential: bool = False) -> None:
        """Keep the contribution at ``place``: tensors (dtype name, elements), packed. ``essential``: whatever the budget.
        PrismError if the disk is full."""
        name = checksum(data)
        blob = self._known.get(name)
        if blob is None and (essential or not self._full):
            blob = self._store(name, descs, data, essential)
        if blob is not None:
            self._entries.append((*place, blob))
            return
        self._entries.append((*place, -1 - len(self._summaries)))
        self._summaries.append((len(data), *digest(descs, data), np.frombuffer(name, np.uint8)))
        self.summarised.append(place)
        self.lost += len(data)

    def _store(self, name: bytes, descs: list[tuple[str, int]], data: Any, essential: bool) -> int | None:
        """Row of the new contents; None if they do not fit."""
        itemsize = len(data) // max(sum(count for _, count in descs), 1) or 1
        codec, stored = encode(data, itemsize)
        if not essential and self.size + len(stored) > self.budget:
            self._full = True
            return None
        self._write(stored)
        row = self._known[name] = len(self._blobs)
        self._blobs.append((self.size, len(stored), len(data), codec, np.frombuffer(name, np.uint8)))
        self.size += len(stored)
        return row

    def finish(self, mode: str = "all") -> Payload:
        """Write the rest and describe the file, which ``commit`` then puts under its own name. ``mode``: what was asked."""
        entries = np.array(self._entries, ENTRY)
        entries = entries[np.lexsort((entries["node"], entries["rank"]))]
        tables = (
            np.array(self._blobs, BLOB).tobytes() + entries.tobytes() + np.array(self._summaries, SUMMARY).tobytes()
        )
        rows = len(self._blobs), len(self._entries), len(self._summaries)
        self._write(tables)
        self._write(FOOTER.pack(self.size, *rows, checksum(tables)))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.discard()
            raise PrismError(f"{self.path}: {error.strerror}; free some space or use --tensors none") from error
        return Payload(uuid=str(self.uuid), path=self.path, mode=mode, bytes=self.size)

    def commit(self) -> None:
        """Replace the store of an older recording, once the graph has replaced the older graph."""
        try:
            os.replace(self._temporary, self.path)
            self._file.close()
        except OSError as error:
            raise PrismError(f"{self.path}: cannot write here: {error.strerror}") from error
        _remove_orphans(self.path, whole=True)

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


def _uncommitted(path: str, uuid: str) -> str:
    """Where the store of this UUID is until it is committed to ``path``."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.prism-{uuid[:8]}.tmp")


def _remove_orphans(path: str, whole: bool) -> None:
    """Remove temporary files whose writer was killed (nobody holds their lock); those that are complete if ``whole``."""
    folder, name = os.path.split(path)
    for orphan in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.prism-*.tmp")):
        try:
            with open(orphan, "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if whole or not _is_whole(file.fileno()):
                    os.unlink(orphan)
        except OSError:
            pass  # another writer is at work, or it is not ours to remove


class PayloadReader:
    """Random access to a payload store: at its path, else the one of its name in folder ``beside`` (the graph's own).
    Contents are verified when they are read. ``known``: what each contribution's entry says of its content.
    ``ran``: int32[W], whose contributions are each rank's (None: its own)."""

    def __init__(self, payload: Payload, beside: str = "", ran: np.ndarray | None = None) -> None:
        self.path = _found(payload, beside)
        try:
            self._file = open(self.path, "rb")
            size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise PrismError(
                f"{self.path}: cannot read the recorded payloads; record again or restore the file"
            ) from error
        head = self._read(0, HEAD)
        if bytes(head[: len(MAGIC)]) != MAGIC or size < HEAD + FOOTER.size:
            raise PrismError(f"{self.path}: not a payload store of this version; record again")
        if str(uuid_module.UUID(bytes=bytes(head[len(MAGIC) :]))) != payload.uuid:
            raise PrismError(f"{self.path}: belongs to another recording; record again")
        start, *rows, name = FOOTER.unpack(self._read(size - FOOTER.size, FOOTER.size))
        lengths = _lengths(rows)
        if start + sum(lengths) + FOOTER.size != size:
            raise PrismError(f"{self.path}: truncated payload store; record again")
        tables = self._read(start, sum(lengths))
        if checksum(tables) != name:
            raise PrismError(f"{self.path}: damaged payload store; record again")
        self.blobs = np.frombuffer(tables, BLOB, rows[0])
        self.entries = np.frombuffer(tables, ENTRY, rows[1], lengths[0])
        self.summaries = np.frombuffer(tables, SUMMARY, rows[2], lengths[0] + lengths[1])
        self.known: dict[Place, int] = {(rank, node): content for rank, node, content in self.entries.tolist()}
        self._ready: dict[int, memoryview] = {}
        self._ran = None if ran is None else ran.tolist()

    def entry(self, rank: int, node: int) -> int | None:
        """What is known of the rank's contribution; None: nothing."""
        return self.known.get((rank if self._ran is None else self._ran[rank], node))

    def get(self, rank: int, node: int) -> memoryview | None:
        """The contribution's bytes (writable, as torch wants them; leave them alone), or None where it was not kept.
        PrismError if they are damaged."""
        blob = self.entry(rank, node)
        if blob is None or blob < 0:
            return None
        ready = self._ready.get(blob)
        return self._decoded(blob, rank, node) if ready is None else ready

    def load(self, places: Iterable[Place]) -> None:
        """Hold these contributions ready, the first LOADED bytes of them, instead of those before: their ``get`` then
        neither reads nor verifies, and a replay's deliveries come in time."""
        self._ready, total = {}, 0
        for rank, node in places:
            blob = self.entry(rank, node)
            if blob is not None and blob >= 0 and blob not in self._ready:
                total += int(self.blobs["length"][blob])
                if total > LOADED:
                    break
                self._ready[blob] = self._decoded(blob, rank, node)

    def _decoded(self, blob: int, rank: int, node: int) -> memoryview:
        offset, stored, length, codec, name = self.blobs[blob]
        try:
            data = decode(int(codec), self._read(int(offset), int(stored)), int(length))
        except (ValueError, OSError):
            data = None
        if data is None or checksum(data) != name.tobytes():
            raise PrismError(f"{self.path}: rank {rank} node {node}: damaged payload (checksum differs); record again")
        return data

    def _read(self, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        count = os.preadv(self._file.fileno(), [data], offset) if length else 0
        while 0 < count < length:  # a read gives 2 GiB at most
            more = os.preadv(self._file.fileno(), [memoryview(data)[count:]], offset + count)
            count = count + more if more else length
        return data


def _found(payload: Payload, beside: str) -> str:
    """The store of this UUID: at its path, beside the graph, or where a writer that was killed before ``commit`` left it;
    else what there is instead."""
    path = os.path.join(beside, payload.path)
    near = os.path.join(beside, os.path.basename(payload.path))
    places = [path, near] if beside else [path]
    places += [_uncommitted(place, payload.uuid) for place in places]
    instead = near if beside and os.path.exists(near) else path
    return next((place for place in places if _is(place, payload.uuid)), instead)


def _lengths(rows: list[int]) -> list[int]:
    """Bytes of the three tables."""
    return [count * table.itemsize for count, table in zip(rows, (BLOB, ENTRY, SUMMARY), strict=True)]


def _is_whole(handle: int) -> bool:
    """Whether ``finish`` came to its end."""
    size = os.fstat(handle).st_size
    if size < HEAD + FOOTER.size:
        return False
    start, *rows, _ = FOOTER.unpack(os.pread(handle, FOOTER.size, size - FOOTER.size))
    return start + sum(_lengths(rows)) + FOOTER.size == size


def _is(path: str, uuid: str) -> bool:
    """Whether ``path`` is a store of this UUID."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD) == MAGIC + uuid_module.UUID(uuid).bytes
    except (OSError, ValueError):
        return False
