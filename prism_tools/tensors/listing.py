"""What a payload store holds, as rows and totals for prism-inspect."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.model import Graph
from prism_tools.graph.names import op_text
from prism_tools.graph.schema import DTYPES
from prism_tools.tensors.payload import PayloadReader


def rows(graph: Graph, payloads: PayloadReader) -> list[dict[str, Any]]:
    """One row a contribution, by rank and node: what it is, whether it is kept, its checksum, and what a summary says."""
    found = []
    for rank, node, content in payloads.entries.tolist():
        program, slots = graph.program_of(rank), graph.ranks.slots[rank]
        dtype, slot = int(program.dtype[node]), int(program.slot[node])
        table, row = (payloads.blobs, content) if content >= 0 else (payloads.summaries, -1 - content)
        summary = {
            name: None if content >= 0 else table[name][row].item() for name in ("minimum", "maximum", "mean", "nans")
        }
        found.append(
            {
                "rank": rank,
                "node": node,
                "iteration": int(program.segment[node]),
                "op": op_text(int(program.op[node])),
                "group": graph.groups.name[slots[slot]],
                "dtype": DTYPES[dtype] if dtype >= 0 else None,
                "count": int(graph.values_of(rank).count[node]),
                "bytes": int(table["length"][row]),
                "kept": "whole" if content >= 0 else "summary",
                "checksum": table["sum"][row].tobytes().hex(),
            }
            | {{"minimum": "min", "maximum": "max"}.get(name, name): value for name, value in summary.items()}
        )
    return found


def brief(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows for eyes: twelve digits of the checksum, six of other numbers, no columns of summaries if there are none."""
    names = [name for name in (found[0] if found else {}) if any(row[name] is not None for row in found)]
    short = [row | {"checksum": row["checksum"][:12]} for row in found]
    return [
        {name: float(f"{row[name]:.6g}") if isinstance(row[name], float) else row[name] for name in names}
        for row in short
    ]


def totals(payloads: PayloadReader) -> dict[str, int]:
    """Numbers of contributions and bytes: kept, of distinct contents, as stored, and of those that are summaries."""
    content = payloads.entries["content"]
    kept = payloads.blobs["length"][content[content >= 0]]
    return {
        "kept": len(kept),
        "kept_bytes": int(kept.sum()),
        "contents": len(payloads.blobs),
        "contents_bytes": int(payloads.blobs["length"].sum()),
        "stored_bytes": int(payloads.blobs["stored"].sum()),
        "summaries": len(payloads.summaries),
        "lost_bytes": int(payloads.summaries["length"].sum()),
    }


def verify(payloads: PayloadReader) -> list[str]:
    """Read every content; one line each that is damaged, with the first contribution that it is."""
    problems = []
    _, firsts = np.unique(payloads.entries["content"], return_index=True)
    for rank, node, _content in payloads.entries[np.sort(firsts)].tolist():
        try:
            payloads.get(rank, node)
        except PrismError as error:
            problems.append(str(error))
    return problems
