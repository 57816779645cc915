"""How numbers and rows are spelt in reports: units, aligned text, TSV and JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

WIDTH = 100
BLOCK = 50_000  # rows of a table that are laid out at once
FORMS = ("text", "tsv", "json")
Row = dict[str, Any]


def milliseconds(ns: float) -> str:
    """182.41; three decimals below 10 ms, four below 1 ms."""
    value = ns / 1e6
    return f"{value:,.{2 if abs(value) >= 10 else 3 if abs(value) >= 1 else 4}f}"


def brief(ns: float) -> str:
    """4.1: milliseconds with two digits, more only before the point."""
    value = ns / 1e6
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def with_interval(ns: float, half_width: float) -> str:
    """182.41 ms ± 0.6: the half-width in the same unit, one decimal less; "± ?" where nothing is known of it (NaN)."""
    if math.isnan(half_width):
        return f"{milliseconds(ns)} ms ± ?"
    decimals = len(milliseconds(ns).partition(".")[2]) - 1
    return f"{milliseconds(ns)} ms ± {half_width / 1e6:.{decimals}f}"


def size(count: float) -> str:
    """1.92 GB: three digits, powers of 1000."""
    units = ["TB", "GB", "MB", "KB", "B"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop()
    decimals = 0 if units[-1] == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:,.{decimals}f} {units[-1]}"


def percent(part: float, whole: float) -> str:
    """81.2 %."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def cut(line: str, width: int = WIDTH) -> str:
    """``line``, its end replaced by … where it is longer than ``width``."""
    return line if len(line) <= width else line[: width - 1] + "…"


def render(rows: Iterable[Row], form: str = "text") -> str:
    """As ``pieces``, in one."""
    return "".join(pieces(rows, form))


def pieces(rows: Iterable[Row], form: str = "text") -> Iterator[str]:
    """Rows with equal keys as "text", "tsv" or "json", bit by bit. Columns named …_ns and …_bytes hold these units.

    Text is for eyes: ms, KB, at most WIDTH wide. TSV and JSON carry the numbers as they are; None is empty, or null.
    """
    blocks = _blocks(rows)
    if form == "json":
        yield from _json(row for block in blocks for row in block)
        return
    names: list[str] = []
    widths: list[int] = []
    left: list[bool] = []
    for block in blocks:
        head = []
        if not names:
            names, head = list(block[0]), [list(block[0])]
            widths, left = [0] * len(names), [False] * len(names)
        if form == "tsv":
            lines = head + [["" if row[name] is None else str(row[name]) for name in names] for row in block]
            yield "".join("\t".join(line) + "\n" for line in lines)
            continue
        head = [[name.replace("_ns", "_ms").replace("_bytes", "").replace("_", " ") for name in line] for line in head]
        cells = head + [[_cell(name, row[name]) for name in names] for row in block]
        left = [
            words or any(isinstance(row[name], str) for row in block) for words, name in zip(left, names, strict=True)
        ]
        widths = [max(width, max(len(line[k]) for line in cells)) for k, width in enumerate(widths)]
        yield "".join(cut(_aligned(line, widths, left).rstrip()) + "\n" for line in cells)


def _blocks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """So many rows at once that short tables are one block: each is aligned with all before it."""
    remaining = iter(rows)
    while block := list(itertools.islice(remaining, BLOCK)):
        yield block


def _json(rows: Iterable[Row]) -> Iterator[str]:
    """What json.dumps makes of a list."""
    before = "[\n "
    for row in rows:
        yield before + json.dumps(row, indent=1, ensure_ascii=False).replace("\n", "\n ")
        before = ",\n "
    yield "[]\n" if before == "[\n " else "\n]\n"


def _aligned(line: list[str], widths: list[int], left: list[bool]) -> str:
    pairs = zip(line, widths, left, strict=True)
    return "  ".join(cell.ljust(width) if words else cell.rjust(width) for cell, width, words in pairs)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_ns"):
        return milliseconds(value)
    if name == "bytes" or name.endswith("_bytes"):
        return size(value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)
