"""Where a graph comes from: the chain of tools that made it, and the machine it was made on. No times of day."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from importlib import metadata

from prism_tools import __version__
from prism_tools.graph.model import Graph

PACKAGES = ("torch", "numpy")
AT_ONCE, IN_TIME = "at once", "at solved times"  # when virtual ranks answered the real ones of a slice


def append(graph: Graph, tool: str, argv: Sequence[str]) -> None:
    """Add the row of ``tool``, run with arguments ``argv``: id, prev (the row before), tool, version, argv (quoted)."""
    taken = {row["id"] for row in graph.provenance}
    number = next(n for n in range(1, len(taken) + 2) if _id(tool, n) not in taken)
    previous = graph.provenance[-1]["id"] if graph.provenance else ""
    row = {"id": _id(tool, number), "prev": previous, "tool": tool, "version": __version__, "argv": shlex.join(argv)}
    graph.provenance.append(row)


def environment() -> dict[str, str]:
    """Host, Python and library versions, and the Slurm job if there is one."""
    found = {"host": socket.gethostname(), "system": platform.platform(), "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    if job := os.environ.get("SLURM_JOB_ID"):
        found["SLURM_JOB_ID"] = job
    return found


def answered(graph: Graph) -> str:
    """When virtual ranks answered in the slices of ``graph``: AT_ONCE or IN_TIME; "": it does not say."""
    about = graph.environment.get("slice")
    return str(about.get("answered", "")) if isinstance(about, dict) else ""


def _id(tool: str, number: int) -> str:
    return tool if number == 1 else f"{tool}.{number}"
