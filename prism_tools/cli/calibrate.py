"""prism-calibrate: solves one globally consistent timeline from measured slices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from prism_tools.cli import common

DESCRIPTION = """Solve one consistent timeline of all ranks from measured slices.

Reads a sliced graph and writes the calibrated graph: the duration of every node with its source,
the start and end of every node on one clock, the time of an iteration and its critical path."""

EXAMPLES = """prism-calibrate sliced.h5 -o calibrated.h5
prism-slice bare.h5 -s 2 | prism-calibrate | prism-inspect summary"""


def get_parser() -> common.Parser:
    """The command line of prism-calibrate."""
    parser = common.new_parser("prism-calibrate", "[options] [FILE]", DESCRIPTION, EXAMPLES, common.SPOOL)
    common.add_input(parser)
    common.add_output(parser)
    return parser


def _calibrate(options: argparse.Namespace) -> None:
    common.check_output(options)
    from prism_tools.calibrate import calibrate

    common.write_graph(calibrate(common.read_graph(options)), options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    return common.run(get_parser(), _calibrate, sys.argv[1:] if argv is None else argv)
