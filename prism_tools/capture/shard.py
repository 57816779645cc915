"""The file that a live rank leaves for prism-record: its trace, and its device's log if there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

COLUMN = "column."  # before the names of node columns; everything that is no array is JSON


def write(trace: dict[str, Any], path: Path) -> None:
    """Write ``trace`` whole or not at all. FileExistsError if there is one."""
    arrays = {name: value for name, value in trace.items() if isinstance(value, np.ndarray)}
    columns = {COLUMN + name: value for name, value in trace["columns"].items()}
    facts = {name: value for name, value in trace.items() if name not in arrays and name != "columns"}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays, **columns, facts=np.array(json.dumps(facts)))  # type: ignore[arg-type]
        os.link(part, path)  # FileExistsError: another process was this rank already
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The trace of a shard."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    trace: dict[str, Any] = json.loads(str(arrays.pop("facts")))
    trace["columns"] = {name.removeprefix(COLUMN): arrays.pop(name) for name in list(arrays) if name.startswith(COLUMN)}
    trace["slots"] = [(name, backend, tuple(ranks)) for name, backend, ranks in trace["slots"]]
    return {**trace, **arrays}
