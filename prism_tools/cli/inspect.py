"""prism-inspect: text, tables, checks and pictures of a graph of any stage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from prism_tools.cli import common
from prism_tools.errors import PrismError
from prism_tools.graph.schema import Kind, Op

DESCRIPTION = """Show what a graph holds: a summary, tables, a check of its invariants, a picture.

Never runs the recorded program, and never unpickles."""

EXAMPLES = """prism-inspect summary replayed.h5
prism-inspect nodes --rank 0-1 --op all_reduce --iteration 2 calibrated.h5
prism-inspect ranks --format tsv bare.h5 | cut -f 1,3
prism-inspect check bare.h5
prism-inspect payloads --verify bare.h5
prism-inspect timeline calibrated.h5 -o timeline.png"""

EXIT_STATUS = """0 success, for check a valid graph, for payloads --verify none damaged; 1 any failure; 2 wrong usage;
130 interrupted; 141 the reader of standard output went away."""

OPS = [op.name.lower() for op in Op if op]


def get_parser() -> common.Parser:
    """The command line of prism-inspect."""
    usage = "summary|ranks|groups|nodes|payloads|check|timeline [options] [FILE]"
    parser = common.new_parser("prism-inspect", usage, DESCRIPTION, EXAMPLES, common.SPOOL, EXIT_STATUS)
    subparsers = parser.add_subparsers(title="subcommands", prog="prism-inspect", metavar="SUBCOMMAND", required=True)
    _add(subparsers, "summary", "the answer first: iteration time, memory, who waits for whom", _summary)
    _add(subparsers, "ranks", "one row a rank: place and classes", _ranks, table=True)
    _add(subparsers, "groups", "one row a process group: backend and members", _groups, table=True)
    nodes = _add(subparsers, "nodes", "one row a node: operation, group, bytes and times", _nodes, table=True)
    nodes.add_argument("--rank", metavar="RANKS", type=common.parse_ranks, help="of these ranks, such as 0-3,8")
    nodes.add_argument("--op", metavar="NAME", choices=OPS, help="of this operation, such as all_reduce")
    nodes.add_argument("--group", metavar="NAME", help="of this group")
    nodes.add_argument("--iteration", metavar="K", type=common.natural, help="of this iteration")
    nodes.add_argument("--kind", choices=[kind.name.lower() for kind in Kind], help="of this kind")
    payloads = _add(
        subparsers, "payloads", "one row a recorded contribution: what is kept of it", _payloads, table=True
    )
    payloads.add_argument("--verify", action="store_true", help="read them all; exit status 1 if one is damaged")
    _add(subparsers, "check", "verify the invariants of the format; exit status 1 if one is broken", _check)
    timeline = _add(subparsers, "timeline", "draw the timeline: one row a rank, the critical path outlined", _timeline)
    common.add_file(
        timeline, "-o", "--output", metavar="FILE", required=True, type=_picture, help="picture: .png, .svg or .pdf"
    )
    timeline.add_argument("--iteration", metavar="K", type=common.natural, help="only this iteration")
    return parser


def _add(
    subparsers: argparse._SubParsersAction,
    name: str,
    about: str,
    body: Callable[[argparse.Namespace], int | None],
    table: bool = False,
) -> common.Parser:
    parser = subparsers.add_parser(
        name, usage="%(prog)s [options] [FILE]", help=about, description=about[0].upper() + about[1:]
    )
    common.add_shared(parser)
    parser.set_defaults(body=body)
    common.add_input(parser)
    parser.add_argument("--partial", action="store_true", help="read a file whose writer did not finish")
    if table:
        parser.add_argument("--format", choices=("text", "tsv", "json"), default="text", help="(default: text)")
    return parser


def _picture(text: str) -> str:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text}: end the name in .png, .svg or .pdf")
    return text


def _summary(options: argparse.Namespace) -> None:
    from prism_tools.analyze.summary import summary

    print(summary(common.read_graph(options)))


def _ranks(options: argparse.Namespace) -> None:
    from prism_tools.analyze.tables import ranks
    from prism_tools.analyze.text import render

    print(render(ranks(common.read_graph(options)), options.format), end="")


def _groups(options: argparse.Namespace) -> None:
    from prism_tools.analyze.group_table import groups
    from prism_tools.analyze.text import render

    print(render(groups(common.read_graph(options)), options.format), end="")


def _nodes(options: argparse.Namespace) -> None:
    from prism_tools.analyze.tables import nodes
    from prism_tools.analyze.text import pieces

    keep = {name: getattr(options, name) for name in ("op", "group", "iteration", "kind")}
    rows = nodes(common.read_graph(options), ranks=options.rank, **keep)
    sys.stdout.writelines(pieces(rows, options.format))


def _payloads(options: argparse.Namespace) -> int:
    from prism_tools.analyze.text import percent, render, size
    from prism_tools.emulate.sandbox import open_payloads
    from prism_tools.tensors.listing import brief, rows, totals, verify

    graph = common.read_graph(options)
    payloads = open_payloads(graph, options.file)
    if payloads is None:
        raise PrismError(
            f"{options.file}: no payloads were recorded; record the program with prism-record --tensors all"
        )
    if options.format == "text":
        print(render(brief(rows(graph, payloads))), end="")
        n = totals(payloads)
        lost = f"{n['summaries']:,} as summaries ({size(n['lost_bytes'])})"
        alike = percent(n["contents_bytes"], n["kept_bytes"])
        print(f"kept      {n['kept']:,} whole ({size(n['kept_bytes'])}), {lost}")
        print(f"contents  {n['contents']:,} distinct ({size(n['contents_bytes'])}, {alike} of what is kept)")
        print(f"stored    {size(n['stored_bytes'])}, {percent(n['stored_bytes'], n['contents_bytes'])} of the contents")
    else:
        print(render(rows(graph, payloads), options.format), end="")
    problems = verify(payloads) if options.verify else []
    print("".join(f"{problem}\n" for problem in problems), end="", file=sys.stderr)
    return int(bool(problems))


def _check(options: argparse.Namespace) -> int:
    from prism_tools.graph.check import check

    problems = check(common.read_graph(options))
    print("\n".join(problems) or "valid")
    return int(bool(problems))


def _timeline(options: argparse.Namespace) -> None:
    from prism_tools.analyze.timeline import draw

    draw(common.read_graph(options), options.output, iteration=options.iteration)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    return common.run(get_parser(), lambda options: options.body(options), sys.argv[1:] if argv is None else argv)
