"""What-if options of prism-calibrate and prism-replay: changes of durations by selector, and what they gain."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism_tools.calibrate.planning import Change, Gain

MOST = 10**15  # ns, eleven days; the largest factor is 10**6: sums of what they make fit int64
UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
SELECTORS = """A selector is words KEY=VALUES, all of which must hold:
op: an operation, such as all_reduce
group: a process group's name, or a dimension of the device mesh
lane: host, gloo, or a stream of a device, such as 'stream 0'
rank, iteration: numbers such as 0-3,8; a bare word of them is ranks
at: a call site: the file, FILE:LINE, or the function; a compute span
has the one that it leads to
kind: compute, comm, wait or mark. Without it, selectors with op,
group or at mean communication, those with lane all that runs there,
and others compute spans
VALUES is a comma list, of which one must hold; a value that nothing
in the graph has is an error. Names are shell patterns, those with
blanks quoted. Members of one operation always change together. The
last = separates the selector from the factor or time; times have a
unit: ns, us, ms or s. Changes are made in the order in which they
are given."""


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add --scale, --set and --delay; ``options.changes`` lists them in the order given."""
    parser.set_defaults(changes=[])
    for how, amount, about in (
        ("scale", "FACTOR", "multiply durations, such as 'op=all_reduce group=dp=0.5'"),
        ("set", "TIME", "replace durations, such as 'kind=compute at=train.py:88=2ms'"),
        ("delay", "TIME", "lengthen durations; of ranks (3=5ms): once an iteration, at its beginning"),
    ):
        parser.add_argument(
            f"--{how}",
            metavar=f"SELECTOR={amount}",
            dest="changes",
            action="append",
            type=_change(how),
            default=argparse.SUPPRESS,
            help=about,
        )


def add_ideal(parser: argparse.ArgumentParser) -> None:
    """Add --ideal, one more change."""
    parser.add_argument(
        "--ideal",
        metavar="comm|balance",
        dest="changes",
        action="append",
        type=_ideal,
        default=argparse.SUPPRESS,
        help="communication takes no time; or ranks with the same program take their mean for every span",
    )


def _change(how: str) -> Callable[[str], Change]:
    def parse(text: str) -> Change:
        from prism_tools.calibrate.planning import Change
        from prism_tools.calibrate.selectors import parse_selector

        selector, _, amount = text.rpartition("=")
        try:
            value = _factor(amount) if how == "scale" else _time(amount)
            return Change(how, parse_selector(selector), value, f"--{how} {text}")
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def _ideal(text: str) -> Change:
    from prism_tools.calibrate.planning import Change

    if text not in ("comm", "balance"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither comm nor balance")
    return Change("ideal", None, text, f"--ideal {text}")


def _factor(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or float(text) > MOST / 10**9:
        raise ValueError(f"{text!r} is no factor such as 0.8")
    return float(text)


def _time(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text)
    time = round(float(match[1]) * UNITS[match[2]]) if match else -1
    if not 0 <= time <= MOST:
        raise ValueError(f"{text!r} is no time such as 2ms")
    return time


def gain_text(gain: Gain) -> str:
    """ "iteration 182.41 → 184.93 ms (+2.52 ± 0.6)", then a line for each step; changes in ms."""
    from prism_tools.analyze.text import milliseconds

    decimals = len(milliseconds(max(gain.before, gain.after)).partition(".")[2])
    before, after = (f"{ns / 1e6:,.{decimals}f}" for ns in (gain.before, gain.after))
    half = "?" if math.isnan(gain.half) else f"{gain.half / 1e6:.{decimals - 1}f}"
    what = "iteration" if gain.counted else "run"
    lines = [f"{what} {before} → {after} ms ({_signed(gain.after - gain.before, decimals)} ± {half})"]
    for text, ns, nodes, critical in gain.parts:
        where = f", critical in {critical} of {gain.counted} iterations" if gain.counted else ""
        lines.append(f"  {text}: {_signed(ns, decimals)} ({nodes:,} nodes{where})")
    if gain.lasting is not None:
        lines.append("  iterations that count also show how slow the warm-up was")
    if gain.lasting and len(gain.lasting) == 2:
        before, after = (f"{ns / 1e6:,.{decimals}f}" for ns in gain.lasting)
        change = _signed(gain.lasting[1] - gain.lasting[0], decimals)
        lines[-1] += f"; repeated for ever they take {before} → {after} ms ({change})"
    return "\n".join(lines)


def _signed(ns: float, decimals: int) -> str:
    return f"{ns / 1e6:+,.{decimals}f}".replace("-", "−")
