"""prism-slice: runs slices of real ranks against virtual peers and measures them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from prism_tools.cli import common
from prism_tools.errors import PrismError
from prism_tools.launch.program import fix_hash_seed

DESCRIPTION = """Measure a recorded program slice by slice: a few real ranks at a time, virtual peers around.

Without a subcommand, "run" is meant: prism-slice bare.h5 -s 2.
A call that was stopped goes on where it was when it is repeated: finished slices are kept beside
the output until that is written. Slices of a calibrated graph are measured anew, at its times."""

EXAMPLES = """prism-slice bare.h5 -s 2 -o sliced.h5
prism-slice plan bare.h5 -s 2
prism-slice run bare.h5 -s 2 --ranks 0-3 --repeat 3 -o part.h5
prism-slice run bare.h5 -s 2 --cover classes --repeat 5 --passes 3 --parallel 4 -o sliced.h5
prism-slice run bare.h5 -s 8 -o sliced.h5 --slurm --slurm-args='--partition=gpu --time=30'
prism-slice run bare.h5 -s 2 --index 1 --no-probe -o slice-1.h5
prism-slice merge slice-0.h5 slice-1.h5 | prism-slice probe -s 2 -o sliced.h5
prism-slice invariance bare.h5 -s 2 --delay 20"""

SUBCOMMANDS = ("run", "plan", "merge", "probe", "invariance")
ENVIRONMENT = {
    "SLURM_ARRAY_TASK_ID": "the slice that run measures, without --index and --ranks",
    **common.NODES,
    **common.SPOOL,
}


def get_parser() -> common.Parser:
    """The command line of prism-slice."""
    usage = "[run|plan|merge|probe|invariance] [options] [FILE] [-- [-m] program [arg ...]]"
    parser = common.new_parser("prism-slice", usage, DESCRIPTION, EXAMPLES, ENVIRONMENT)
    subparsers = parser.add_subparsers(title="subcommands", prog="prism-slice", metavar="SUBCOMMAND", required=True)
    program = "[-- [-m] program [argument ...]]"

    _add_run(subparsers, program)
    _add_cover(_add(subparsers, "plan", "[options] -s S [FILE]", "print the slices as TSV; run nothing", _plan))
    _add_merge(subparsers)
    _add_probe(subparsers)

    about = "test the graph: repeat slices with random virtual delays, print compute spans that moved"
    invariance = _add(subparsers, "invariance", f"[options] -s S [FILE] {program}", about, _invariance)
    invariance.add_argument(
        "--delay",
        metavar="MS",
        type=common.positive,
        default=30,
        help="largest random delay of a virtual peer, ms (default: 30)",
    )
    invariance.add_argument("--seed", metavar="N", type=common.natural, default=0, help="of the delays (default: 0)")
    common.add_command(invariance)
    return parser


def _add(
    subparsers: argparse._SubParsersAction,
    name: str,
    usage: str,
    about: str,
    body: Callable[[argparse.Namespace], int | None],
    size_required: bool = True,
) -> common.Parser:
    parser = subparsers.add_parser(
        name, usage=f"%(prog)s {usage}", help=about, description=about[0].upper() + about[1:]
    )
    common.add_shared(parser)
    parser.set_defaults(body=body)
    common.add_input(parser)
    size_help = "ranks that run for real at a time" + ("" if size_required else " (default: every operation crosses)")
    parser.add_argument("-s", "--size", metavar="S", type=common.positive, required=size_required, help=size_help)
    return parser


def _add_run(subparsers: argparse._SubParsersAction, program: str) -> None:
    run = _add(subparsers, "run", f"[options] -s S [FILE] {program}", "run and measure the slices", _run)
    common.add_output(run)
    which = run.add_mutually_exclusive_group()
    which.add_argument(
        "--ranks", metavar="RANKS", type=common.parse_ranks, help="only the slices that hold these ranks"
    )
    help_ = "only slice I of the plan, counted from 0 (default: $SLURM_ARRAY_TASK_ID in an array job)"
    which.add_argument("--index", metavar="I", type=common.natural, help=help_)
    run.add_argument("--repeat", metavar="R", type=common.positive, default=1, help="runs of each slice (default: 1)")
    help_ = "measure all slices up to N times, from the second on with virtual peers at solved times (default: 1)"
    run.add_argument("--passes", metavar="N", type=common.positive, default=1, help=help_)
    help_ = "slices that run at once, each on cores of its own (default: 1)"
    run.add_argument("--parallel", metavar="P", type=common.positive, default=1, help=help_)
    help_ = "begin anew: forget what an earlier call, stopped before its end, has measured"
    run.add_argument("-f", "--force", action="store_true", help=help_)
    run.add_argument("--no-probe", action="store_true", help="do not measure the crossing operations alone")
    common.add_nodes(run)
    common.add_slurm(run)
    common.add_command(run)
    _add_cover(run)


def _add_cover(parser: argparse.ArgumentParser) -> None:
    help_ = "slices that hold every rank, or only one of each program class (default: all)"
    parser.add_argument("--cover", choices=("all", "classes"), default="all", help=help_)


def _add_probe(subparsers: argparse._SubParsersAction) -> None:
    about = "measure the operations that cross a slice's edge, alone"
    probe = _add(subparsers, "probe", "[options] [FILE]", about, _probe, False)
    common.add_output(probe)
    help_ = "runs of each operation (default: 20)"
    probe.add_argument("--repeats", metavar="R", type=common.positive, default=20, help=help_)
    common.add_nodes(probe)
    _add_cover(probe)


def _add_merge(subparsers: argparse._SubParsersAction) -> None:
    about = "join sliced graphs of one recording, such as those of an array job, in any order"
    parser = subparsers.add_parser(
        "merge", usage="%(prog)s [options] FILE [FILE ...]", help=about, description=about[0].upper() + about[1:]
    )
    common.add_shared(parser)
    parser.set_defaults(body=_merge)
    common.add_file(parser, "files", metavar="FILE", nargs="+", help="sliced graph")
    common.add_output(parser)


def _run(options: argparse.Namespace) -> None:
    options.nodes = common.setting(options.nodes, "PRISM_NODES")
    _check_options(options)
    if common.uses_slurm(options):
        return _by_slurm(options)
    common.check_output(options)
    fix_hash_seed()
    if options.ranks is None and options.index is None:
        options.index = common.setting(None, "SLURM_ARRAY_TASK_ID", kind=common.natural)
        if options.index is not None:
            options.progress.warn(f"only slice {options.index}, by SLURM_ARRAY_TASK_ID; --index or --ranks name others")
    if options.passes > 1:
        _check_passes(options)
    graph = common.read_graph(options)
    common.choose_command(graph, options)
    from prism_tools.slicing.run import prepared, run  # after reading: it takes seconds

    todo = prepared(graph, options)
    with _parts(options, len(todo)) as folder:
        try:
            common.write_graph(run(graph, options, todo, folder), options)
        except BaseException:
            if folder and any(folder.glob("*.h5")):
                options.progress.warn(f"finished slices are kept in {folder}; the same command goes on")
            raise


def _check_options(options: argparse.Namespace) -> None:
    if options.slurm and (options.parallel > 1 or options.passes > 1 or options.force):
        what = "--parallel, --passes and --force are for this machine"
        raise PrismError(f"--slurm: {what}; a calibrated graph makes the next pass", status=2)


def _check_passes(options: argparse.Namespace) -> None:
    if options.index is not None or options.ranks is not None:
        remedy = "calibrate what all slices measured, and slice that graph"
        raise PrismError(f"--passes: a further pass needs every slice; {remedy}", status=2)
    if options.no_probe:
        raise PrismError("--passes: solving needs the crossing operations' times; leave --no-probe out", status=2)
    options.progress.log = not options.quiet


def _parts(options: argparse.Namespace, count: int) -> AbstractContextManager[Path | None]:
    """The folder for finished slices, if there is more than one to lose, and a graph that comes from and goes to a file."""
    from prism_tools.launch.jobs import parts
    from prism_tools.slicing.array import question

    special = os.path.exists(options.output) and not os.path.isfile(options.output)
    if (count == 1 and options.passes == 1) or not os.path.isfile(options.file) or options.output == "-" or special:
        return nullcontext()
    words = question(options, common.recorded_program(options))
    return parts(options.tool, options.file, options.output, words, options.force)


def _by_slurm(options: argparse.Namespace) -> None:
    """Each slice, and the probes, as a job of an array."""
    from prism_tools.launch.jobs import Parts, parts
    from prism_tools.slicing.array import commands, gathered, question

    program = common.recorded_program(options)
    graph = common.read_graph(options)
    common.choose_command(graph, options)
    with parts(options.tool, options.file, options.output, question(options, program)) as folder:
        array = Parts(
            folder,
            commands(graph, options, folder, common.this_tool(), program),
            options.nodes,
            options.slurm_args or [],
            options.progress,
        )
        array.complete()
        options.file, graph = gathered([str(array.path(name)) for name in array.commands])
        common.write_graph(graph, options)


def _plan(options: argparse.Namespace) -> None:
    from prism_tools.slicing.plan import plan

    plan(common.read_graph(options), options)


def _merge(options: argparse.Namespace) -> None:
    common.check_output(options)
    from prism_tools.graph import file
    from prism_tools.slicing.merge import merge

    options.file, graph = merge([(name, file.read(name)) for name in options.files])
    if missing := common.unmeasured(graph):
        options.progress.warn(f"ranks {missing} are in no part; is a slice missing?")
    common.write_graph(graph, options)


def _probe(options: argparse.Namespace) -> None:
    options.nodes = common.setting(options.nodes, "PRISM_NODES")
    common.check_output(options)
    from prism_tools.slicing.probe import probe

    common.write_graph(probe(common.read_graph(options), options), options)


def _invariance(options: argparse.Namespace) -> int | None:
    fix_hash_seed()
    graph = common.read_graph(options)
    common.choose_command(graph, options)
    from prism_tools.slicing.invariance import invariance  # after reading: it takes seconds

    return invariance(graph, options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    arguments = common.default_subcommand(sys.argv[1:] if argv is None else argv, SUBCOMMANDS, "run")
    return common.run(get_parser(), lambda options: options.body(options), arguments)
