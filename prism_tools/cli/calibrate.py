"""prism-calibrate: solves one globally consistent timeline from measured slices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prism_tools.cli import changes, common
from prism_tools.errors import PrismError

if TYPE_CHECKING:
    from prism_tools.graph.model import Graph

DESCRIPTION = """Solve one consistent timeline of all ranks from measured slices.

Reads a sliced graph and writes the calibrated graph: the duration of every node with its source,
the start and end of every node on one clock, the time of an iteration and its critical path, and
the steady state: the cycle time of an iteration that is repeated for ever.

With --realign, or a change of durations, also prints what an iteration gains, on standard error.
A graph that is calibrated already is then solved with the durations that it has."""

EXAMPLES = """prism-calibrate sliced.h5 -o calibrated.h5
prism-slice bare.h5 -s 2 | prism-calibrate | prism-inspect summary
prism-calibrate --realign newly-sliced.h5 calibrated.h5 -o realigned.h5
prism-calibrate --scale 'op=all_reduce group=dp=0.5' --delay 3=5ms calibrated.h5 -o plan.h5
prism-calibrate --ideal balance calibrated.h5 -o balanced.h5"""


def get_parser() -> common.Parser:
    """The command line of prism-calibrate."""
    parser = common.new_parser("prism-calibrate", "[options] [FILE]", DESCRIPTION, EXAMPLES, common.SPOOL)
    parser.man = {"SELECTORS": changes.SELECTORS, **parser.man}
    common.add_input(parser)
    common.add_output(parser)
    common.add_file(
        parser, "--realign", metavar="NEW", help="take over what slices in NEW measured anew of the same program"
    )
    changes.add_changes(parser)
    changes.add_ideal(parser)
    return parser


def _calibrate(options: argparse.Namespace) -> None:
    common.check_output(options)
    from prism_tools.calibrate import calibrate
    from prism_tools.calibrate.planning import plan
    from prism_tools.calibrate.realign import realign
    from prism_tools.graph import file

    if options.realign == options.file == "-":
        raise PrismError("--realign -: standard input cannot be both graphs; name one of them", status=2)
    graph = common.read_graph(options)
    gains = []
    if options.realign:
        name = "standard input" if options.realign == "-" else options.realign
        new = file.read(options.realign)
        _warn_of_answers(graph, new, name, options)
        graph, gain = realign(graph, new, name)
        gains.append(gain)
    if options.changes:
        graph, gain = plan(graph, options.changes)
        gains.append(gain)
    if not gains:
        graph = calibrate(graph)
    if missing := common.unmeasured(graph):
        remedy = "measure them, or slice with --cover classes"
        options.progress.warn(
            f"ranks {missing} were never measured, others of their programs stand in for them; {remedy}"
        )
    _warn_of_emulated(graph, options)
    if not gains:
        _warn_of_borrowed(graph, options)
    common.write_graph(graph, options)
    for gain in gains:
        print(changes.gain_text(gain), file=sys.stderr)


def _warn_of_answers(graph: Graph, new: Graph, name: str, options: argparse.Namespace) -> None:
    from prism_tools.graph.provenance import answered

    here, there = answered(new), answered(graph)
    if here and there and here != there:
        what = f"its virtual ranks answered {here}, those of the calibrated graph's slices {there}"
        options.progress.warn(f"{name}: {what}: some of what is new may be due to that")


def _warn_of_emulated(graph: Graph, options: argparse.Namespace) -> None:
    """Our own data plane says little of the job's: say how much of the answer comes from it."""
    from prism_tools.analyze.waits import path_shares
    from prism_tools.graph.alike import timed_alike
    from prism_tools.graph.schema import Source

    emulated = sum(int((row == Source.EMULATED).sum()) for row in graph.durations.source) if graph.durations else 0
    if not emulated:
        return
    shares = path_shares(graph, timed_alike(graph))
    share = 100 * shares.by_source[Source.EMULATED] / max(shares.total, 1)
    what = f"operations that no slice and no probe measured ({share:.1f} % of the critical path) took what our data plane took"
    options.progress.warn(f"{what}; run prism-slice probe")


def _warn_of_borrowed(graph: Graph, options: argparse.Namespace) -> None:
    from prism_tools.analyze.text import milliseconds
    from prism_tools.calibrate.steady import borrowed

    timeline, steady = graph.timeline, graph.steady
    if timeline is not None and steady is not None and borrowed(timeline, steady):
        lasting, shown = (milliseconds(ns) for ns in (steady.total_ns / steady.iterations, timeline.iteration_time_ns))
        what = f"an iteration that is repeated for ever takes {lasting} ms, those that count {shown}"
        options.progress.warn(f"{what}: they live on a slower warm-up; record more iterations, with more --warmup")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    return common.run(get_parser(), _calibrate, sys.argv[1:] if argv is None else argv)
