"""PrismTrace files: read and write a Graph as HDF5, in files and pipes. The only importer of h5py."""

from __future__ import annotations

import io
import os
from typing import IO, Any

import h5py
import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph import stream
from prism_tools.graph.fields import Tree
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import FORMAT, VERSION
from prism_tools.graph.structure import structure_problem
from prism_tools.graph.tree import PARTS, from_tree, to_tree

LIBVER = ("v110", "v110")  # all metadata has checksums from here on, without which HDF5 crashes on damaged files
SIGNATURE = b"\x89HDF\r\n\x1a\n"
COMPRESS_FROM = 4096  # bytes; smaller arrays are not compressed
CHUNK_BYTES = 1 << 20
DEPTH = 4  # groups within groups; deeper is no file of ours

# What h5py raises on damaged files: it has no class of its own, and a size gone wrong shows as lack of memory.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError)


def read(path: str | os.PathLike[str], partial: bool = False) -> Graph:
    """The graph in ``path`` ("-": standard input, a pipe or a redirected file).

    PrismError names the path if it is missing, unreadable, not a prismtrace graph, newer, truncated or damaged, or
    incomplete (unless ``partial``). ``launch.foreign_owner`` is set to the uid of a file owned by somebody else.
    """
    with stream.source(os.fspath(path)) as source:
        try:
            graph = _read(source.stream, partial)
        except PrismError as error:
            raise PrismError(f"{source.name}: {error}", error.status, error.detail) from None
        if graph.launch.foreign_owner < 0 <= source.owner != os.geteuid():
            graph.launch.foreign_owner = source.owner
    return graph


def write(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write ``graph`` to ``path`` ("-": standard output), whole or not at all; the same graph gives the same bytes.

    A file is built beside its target and renamed. PrismError names the path if it cannot be written; then an old file
    is untouched. A terminal is refused.
    """
    if problem := structure_problem(graph):  # nobody could read it
        raise PrismError(f"{os.fspath(path)}: not written, the graph does not hold together: {problem}; report this")
    tree = to_tree(graph)
    size = _size(tree) + sum(len(image) for image in graph.unknown.values())

    def build(target: IO[bytes]) -> None:
        with h5py.File(target, "w", libver=LIBVER) as file:
            _fill(file, {name: value for name, value in tree.items() if name != "complete"})
            for name in sorted(graph.unknown):
                with h5py.File(io.BytesIO(graph.unknown[name]), "r") as image:
                    image.copy(name, file)
            file.flush()
            file.attrs["complete"] = bool(tree["complete"])  # last: without it nobody takes the file for whole

    stream.save(os.fspath(path), build, size)


def _read(source: IO[bytes], partial: bool) -> Graph:
    head = source.read(len(SIGNATURE))
    if not head:
        raise PrismError("is empty; the tool that should have written it failed, run that again")
    if head != SIGNATURE:
        raise PrismError("is not an HDF5 file; give a graph that a prism tool wrote")
    try:
        with h5py.File(source, "r") as file:
            _check_header(file, partial)
            tree: Tree = {"complete": False} | _load(file, DEPTH, PARTS)
            unknown = {name: _image(file, name) for name in file if name not in PARTS}
    except _DAMAGE as error:
        state = "is truncated" if "truncated" in str(error) else f"is damaged ({_first_line(error)})"
        raise PrismError(f"{state}; copy or make it again") from None
    graph = from_tree(tree)
    graph.unknown = unknown
    if problem := structure_problem(graph):
        raise PrismError(f"damaged graph: {problem}; make the file again")
    return graph


def _check_header(file: h5py.File, partial: bool) -> None:
    if _plain(file.attrs.get("format")) != FORMAT:
        raise PrismError("is an HDF5 file of another program; give a graph that a prism tool wrote")
    version = file.attrs.get("version")
    if not isinstance(version, np.integer) or version < 1:
        raise PrismError("damaged graph: @version is not a number; make the file again")
    if version > VERSION:
        raise PrismError(f"has format version {version}, these tools read up to {VERSION}; use newer prism tools")
    if not file.attrs.get("complete", False) and not partial:
        raise PrismError("is incomplete: the tool that wrote it did not finish; run that again, or add --partial")


def _load(group: h5py.Group, depth: int, names: tuple[str, ...] = ()) -> Tree:
    """Attributes, datasets and subgroups of ``group`` (only ``names``, if given) as a tree."""
    tree: Tree = {name: _plain(value) for name, value in group.attrs.items()}
    for name in names or group:
        if name in group:
            child = group[name]
            if isinstance(child, h5py.Group) and depth == 0:
                raise ValueError(f"{child.name} is nested too deeply")
            tree[name] = _load(child, depth - 1) if isinstance(child, h5py.Group) else child[()]
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):  # np.bytes_ too
        return value.decode("utf-8", "surrogateescape")
    return value.item() if isinstance(value, np.generic) else value


def _fill(group: h5py.Group, tree: Tree) -> None:
    """Write a tree in its own order: dicts as groups, arrays as datasets, everything else as attributes."""
    for name, value in tree.items():
        if isinstance(value, dict):
            _fill(group.create_group(name), value)
        elif isinstance(value, np.ndarray):
            group.create_dataset(name, data=value, **_storage(value))
        elif isinstance(value, str):
            text = value.encode("utf-8", "surrogateescape")
            # Of fixed length: the heap of variable ones has no checksum, and HDF5 hangs where it is damaged.
            group.attrs.create(name, np.bytes_(text), dtype=h5py.string_dtype("utf-8", max(len(text), 1)))
        else:
            group.attrs[name] = np.int64(value) if not isinstance(value, bool) else value


def _storage(array: np.ndarray) -> dict[str, Any]:
    """How an array is stored. HDF5 has checksums for the data of chunked arrays only, so that all are, but empty ones."""
    if not array.size:
        return {}
    if array.nbytes < COMPRESS_FROM:
        return {"chunks": array.shape, "fletcher32": True}
    row = array.nbytes // len(array)
    chunks = (min(len(array), max(1, CHUNK_BYTES // row)), *array.shape[1:])
    return {
        "chunks": chunks,
        "shuffle": True,
        "compression": "gzip",
        "compression_opts": 1,  # 4: 2 % smaller, a quarter slower
        "fletcher32": True,
    }


def _image(file: h5py.File, name: str) -> bytes:
    """An object that this version does not know, as an HDF5 file of its own: copied unread, filters and all."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=LIBVER) as image:
        file.copy(name, image)
    return buffer.getvalue()


def _size(tree: Tree) -> int:
    return sum(
        _size(v) if isinstance(v, dict) else v.nbytes if isinstance(v, np.ndarray) else 64 for v in tree.values()
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip("'\"").splitlines() or [type(error).__name__])[0]
