"""prism-replay: runs a few sandbox ranks for real, in real time, against virtual peers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from prism_tools.cli import changes, common
from prism_tools.launch.program import fix_hash_seed

DESCRIPTION = """Run a few ranks of a calibrated graph for real, against virtual peers, in real time.

The sandbox ranks run the recorded program; all others are played from the graph, so that each wait
takes as long as in the whole job. In a Slurm allocation of two nodes the assistant, which plays
them, has the first node for itself, and the sandbox ranks run on the second; 2N nodes are N such
pairs, each of which keeps the payloads of its ranks. Writes the replayed graph: measured times,
late deliveries and peak memory of the sandbox ranks. --scale, --set and --delay change what virtual
ranks and operations take, before the replay; the sandbox ranks' own work is real."""

EXAMPLES = """prism-replay -r 0-1 calibrated.h5 -o replayed.h5
prism-slice bare.h5 -s 2 | prism-calibrate | prism-replay -r 0-1 | prism-inspect summary
prism-replay -r 0-1 --delay 3=5ms calibrated.h5 -o replayed.h5
prism-replay -r 0-7 calibrated.h5 -o run.h5 --slurm --slurm-args='-p cpu : -p gpu'
prism-replay -r 0,7 calibrated.h5 -o replayed.h5 -- train.py --tp 2 --pp 2"""


def get_parser() -> common.Parser:
    """The command line of prism-replay."""
    usage = "[options] -r RANKS [FILE] [-- [-m] program [argument ...]]"
    parser = common.new_parser("prism-replay", usage, DESCRIPTION, EXAMPLES, {**common.NODES, **common.SPOOL})
    parser.man = {"SELECTORS": changes.SELECTORS, **parser.man}
    common.add_input(parser)
    parser.add_argument(
        "-r", "--ranks", metavar="RANKS", type=common.parse_ranks, required=True, help="sandbox ranks, such as 0-3,8"
    )
    common.add_output(parser)
    changes.add_changes(parser)
    common.add_nodes(parser)
    common.add_slurm(parser)
    common.add_command(parser)
    return parser


def _replay(options: argparse.Namespace) -> None:
    options.nodes = common.setting(options.nodes, "PRISM_NODES")
    if common.uses_slurm(options):
        return _by_slurm(options)
    common.check_output(options)
    fix_hash_seed()
    graph = common.read_graph(options)
    common.choose_command(graph, options)
    if options.changes and graph.durations is not None:  # else replay says what is missing
        from prism_tools.calibrate.planning import plan
        from prism_tools.emulate.sandbox import check_ranks

        check_ranks(graph, options.ranks, options.file)
        graph, gain = plan(graph, options.changes, options.ranks)
        print(changes.gain_text(gain), file=sys.stderr)
    from prism_tools.emulate.replay import replay  # after reading: it takes seconds

    common.write_graph(replay(graph, options), options)


def _by_slurm(options: argparse.Namespace) -> None:
    """As one job, whose graph becomes ours."""
    from prism_tools.graph import file
    from prism_tools.launch.jobs import Parts, parts

    program = common.recorded_program(options)
    graph = common.read_graph(options)
    common.choose_command(graph, options)
    from prism_tools.emulate.replay import check_graph  # before the job waits in the queue

    check_graph(graph, options)
    ranks = ",".join(map(str, options.ranks))
    wanted = ["-r", ranks, *(word for change in options.changes for word in change.text.split(" ", 1)), *options.places]
    with parts(options.tool, options.file, options.output, [wanted, options.nodes, program]) as folder:
        part = str(folder / "replay.h5")
        command = [*common.this_tool(), *wanted, os.path.abspath(options.file), "-o", part, *program]
        Parts(folder, {"replay": command}, options.nodes, options.slurm_args or [], options.progress).complete()
        options.file = part  # its payload's path counts from there
        common.write_graph(file.read(part), options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    return common.run(get_parser(), _replay, sys.argv[1:] if argv is None else argv)
