"""Typed fields of the nested dict that a file holds: packing on the way out, checked access on the way in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.model import Ragged

Tree = dict[str, Any]  # name -> subtree, numpy array (a dataset), or int, bool, str (an attribute)


def pack_rows(rows: Sequence[Any] | Ragged, dtype: Any) -> Tree:
    """Rows of different lengths: ``offset`` int64[n + 1], ``data``."""
    ragged = Ragged.from_rows(rows, dtype)
    return {"offset": ragged.offset, "data": ragged.data}


def pack_strings(strings: Iterable[str]) -> Tree:
    """Strings: ``offset`` int64[n + 1] into ``utf8``; bytes that are no UTF-8 (paths) survive as surrogates."""
    strings = list(strings)
    joined = "".join(strings)
    if joined.isascii():
        offset = np.concatenate([[0], np.cumsum([len(text) for text in strings])]).astype(np.int64)
        return {"offset": offset, "utf8": np.frombuffer(joined.encode(), np.uint8)}
    return pack_bytes(text.encode("utf-8", "surrogateescape") for text in strings)


def pack_bytes(values: Iterable[bytes]) -> Tree:
    """Byte strings, as pack_strings."""
    values = list(values)
    offset = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64)
    return {"offset": offset, "utf8": np.frombuffer(b"".join(values), np.uint8)}


def pack_lists(lists: Mapping[str, tuple[Sequence[np.ndarray], str]]) -> Tree:
    """Several lists of arrays whose k-th arrays are equally long: one ``offset`` for all, one dataset a list."""
    offset: np.ndarray | None = None
    tree: Tree = {}
    for name, (rows, dtype) in lists.items():
        packed = pack_rows(rows, dtype)
        if offset is not None and not np.array_equal(offset, packed["offset"]):
            raise ValueError(f"{name} has rows of other lengths than {next(iter(lists))}")
        offset, tree[name] = packed["offset"], packed["data"]
    return {"offset": offset, **tree}


def damaged(path: str, problem: str) -> PrismError:
    """The error for content that no writer of this format leaves behind."""
    return PrismError(f"damaged graph: {path} {problem}; make the file again")


class Fields:
    """One group of a tree that was read: every accessor checks presence, type and shape, or raises PrismError."""

    def __init__(self, tree: Tree, path: str = "") -> None:
        self.tree, self.path = tree, path

    def __contains__(self, name: str) -> bool:
        return name in self.tree

    def group(self, name: str) -> Fields:
        """The group ``name``."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise damaged(f"{self.path}/{name}", "is not a group")
        return Fields(value, f"{self.path}/{name}")

    def array(self, name: str, dtype: str, length: int | None = None, width: int = 0) -> np.ndarray:
        """The array ``name``: of ``dtype`` exactly, ``length`` rows if given, ``width`` columns if given."""
        value = self._get(name)
        path, want = f"{self.path}/{name}", np.dtype(dtype)
        if not isinstance(value, np.ndarray):
            raise damaged(path, "is not an array")
        if (value.dtype.kind, value.dtype.itemsize) != (want.kind, want.itemsize):
            raise damaged(path, f"has type {value.dtype}, not {want.name}")
        shape = (len(value) if value.ndim and length is None else length, *([width] if width else []))
        if value.shape != shape:
            raise damaged(path, f"has shape {value.shape}, not {shape}")
        return value.astype(want, copy=False)

    def integer(self, name: str) -> int:
        """The integer attribute ``name``."""
        value = self._get(name)
        if not isinstance(value, (int, np.integer)):
            raise damaged(f"{self.path}@{name}", "is not an integer")
        return int(value)

    def flag(self, name: str) -> bool:
        """The boolean attribute ``name``."""
        value = self._get(name)
        if not isinstance(value, (bool, np.bool_)):
            raise damaged(f"{self.path}@{name}", "is not true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """The text attribute ``name``."""
        value = self._get(name)
        if not isinstance(value, str):
            raise damaged(f"{self.path}@{name}", "is not text")
        return value

    def rows(self, name: str, dtype: str, count: int | None = None) -> Ragged:
        """Rows packed by pack_rows; ``count`` of them if given."""
        group = self.group(name)
        data = group.array("data", dtype)
        return Ragged(group.offset(len(data), count), data)

    def bytes(self, name: str, count: int | None = None) -> list[bytes]:
        """Byte strings packed by pack_bytes."""
        raw, places = self._raw(name, count)
        return [raw[a:b] for a, b in places]

    def strings(self, name: str, count: int | None = None) -> list[str]:
        """Strings packed by pack_strings."""
        raw, places = self._raw(name, count)
        if raw.isascii():
            text = raw.decode()
            return [text[a:b] for a, b in places]
        return [raw[a:b].decode("utf-8", "surrogateescape") for a, b in places]

    def _raw(self, name: str, count: int | None) -> tuple[Any, Iterable[tuple[int, int]]]:
        group = self.group(name)
        raw = group.array("utf8", "u1").tobytes()
        offset = group.offset(len(raw), count).tolist()
        return raw, zip(offset[:-1], offset[1:], strict=True)

    def lists(self, dtypes: dict[str, str], count: int | None = None) -> dict[str, list[np.ndarray]]:
        """Lists of arrays packed by pack_lists in this group."""
        length = len(self.array(next(iter(dtypes)), dtypes[next(iter(dtypes))]))
        offset = self.offset(length, count)
        data = {name: self.array(name, dtype, length) for name, dtype in dtypes.items()}
        return {name: split(offset, array) for name, array in data.items()}

    def offset(self, end: int, count: int | None = None, name: str = "offset") -> np.ndarray:
        """The offsets ``name``: from 0 to ``end`` without a step back, for ``count`` rows if given."""
        offset = self.array(name, "i8", None if count is None else count + 1)
        path = f"{self.path}/{name}"
        if not len(offset) or offset[0] != 0 or offset[-1] != end:
            raise damaged(path, f"does not run from 0 to {end}")
        if np.any(offset[1:] < offset[:-1]):
            raise damaged(path, "steps back")
        return offset

    def _get(self, name: str) -> Any:
        if name not in self.tree:
            raise damaged(f"{self.path}/{name}", "is missing")
        return self.tree[name]


def split(offset: np.ndarray, data: np.ndarray) -> list[np.ndarray]:
    """The rows of ``data``: row k is data[offset[k]:offset[k + 1]] (views)."""
    return [data[a:b] for a, b in zip(offset[:-1].tolist(), offset[1:].tolist(), strict=True)]
