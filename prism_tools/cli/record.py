"""prism-record: runs all W logical ranks of a program on a few devices, or watches real ranks, and writes the graph."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from prism_tools.cli import common
from prism_tools.errors import PrismError

DESCRIPTION = """Record a torch.distributed program of W ranks, running a few at a time.

The program is not changed. All its ranks run on this machine, or, inside a Slurm allocation, on its
nodes, neighbours together: memory beyond one machine's. A rank gives up its slot where it waits for
another. The bare graph says what each rank did, in what order and with which payloads;
it holds no times to rely on. If no rank can go on any more, a table says who waits where, for whom.
A program that hangs only where sends wait for their receives shows this with --sends rendezvous.

With --rules each rank runs alone: the rules of a TOML file say what it receives, and it waits for
nobody. With --dedup one rank runs for all that do the same. share/doc/prism/rules.md describes the
rules; share/prism/rules has some that are ready.

With --live the command after -- is a launcher (torchrun, srun, mpiexec) of a real job, on GPUs or
CPUs: it runs as it is, with its real backends, and the graph holds the measured times of all its
ranks, ready for prism-calibrate. Each rank's Python needs prism-tools, and GPUs a C compiler once.
With --warmup 4 or more, the GPUs are held back in one of these iterations, so that the host gets
ahead of them: only then can the work of a GPU that waits for its host be told from its wait."""

EXAMPLES = """prism-record -n 8 -j 2 -o bare.h5 -- train.py --tp 2 --pp 2
prism-record -n 64 --iterations 3 --tensors cut=0-3 -o bare.h5 -- -m package.train config.toml
prism-record -n 8192 --dedup --rules rules.toml -o bare.h5 -- train.py --tp 8 --pp 8
prism-record --live --warmup 3 --iterations 10 -o live.h5 -- torchrun --nproc-per-node 8 train.py"""

EXIT_STATUS = """0 if every rank ended with 0; else the status of the first rank that failed, 128+N if signal N ended it.
1 deadlock, mismatch, a rank that left by os._exit(0), or another failure of the recording;
2 wrong usage; 127 no such program; 128+N if signal N stopped the tool (130 interrupted, 143 terminated).
With --live: that of the command."""

ENVIRONMENT = {
    "PRISM_WORLD_SIZE": "world size, without -n",
    "PRISM_JOBS, SLURM_CPUS_ON_NODE": "ranks running at a time on a node, without -j",
    **common.NODES,
    "CC, XDG_CACHE_HOME": "--live on GPUs: the C compiler, and where what it made is kept (prism-tools/)",
}


def get_parser() -> common.Parser:
    """The command line of prism-record."""
    usage = "[options] (-n W | --live) -o FILE -- [-m] program|launcher [argument ...]"
    parser = common.new_parser("prism-record", usage, DESCRIPTION, EXAMPLES, ENVIRONMENT, EXIT_STATUS)
    add = parser.add_argument
    _add_places(add)
    common.add_file(parser, "-o", "--output", metavar="FILE", help="write the graph to FILE")
    add("--live", action="store_true", help="trace the real ranks that the command starts, with their times")
    add(
        "--nproc-per-node",
        metavar="L",
        type=common.positive,
        help="ranks on each node, as the program sees it (default: 8, or W if smaller)",
    )
    add("--warmup", metavar="K", type=common.natural, default=1, help="iterations that warm up (default: 1)")
    add(
        "--iterations",
        metavar="M",
        type=common.positive,
        help="stop after K+M iterations, which optimizer steps end (default: run to the end; "
        "--live: trace no more, the program goes on)",
    )
    add(
        "--reduce-order",
        choices=("rank", "ring"),
        default="rank",
        help="add contributions in the order of ranks, or in gloo's ring, for its bits (default: rank)",
    )
    add(
        "--sends",
        choices=("eager", "rendezvous"),
        default="eager",
        help="a send ends at once, or waits until its receive is posted (default: eager)",
    )
    add(
        "--pretend-cuda",
        action="store_true",
        help="programs that need CUDA and NCCL run on CPUs: their structure, with nothing of a GPU's times or memory",
    )
    _add_payloads(add)
    _add_rules(parser)
    common.add_command(parser, recorded=False)
    return parser


def _add_places(add: Callable[..., object]) -> None:
    add("-n", "--world-size", metavar="W", type=common.positive, help="ranks of the program")
    add(
        "-j", "--jobs", metavar="N", type=common.positive, help="ranks running at a time on a node (default: all cores)"
    )
    add(
        "--nodes",
        metavar="N",
        type=common.positive,
        help="nodes of the Slurm allocation on which the ranks run (default: all; without Slurm 1: this machine)",
    )


def _add_rules(parser: common.Parser) -> None:
    common.add_file(
        parser,
        "--rules",
        metavar="RULES",
        help="run each rank alone, and answer its communication by the rules of this TOML file (rules.md)",
    )
    parser.add_argument(
        "--dedup",
        action="store_true",
        help="with --rules: run one rank for all that do the same, such as one of each data-parallel group, "
        "and a few more to compare",
    )
    parser.add_argument(
        "--explain-rules",
        action="store_true",
        help="with --rules: record nothing; print which rule answers which operations, and which have none",
    )


def _add_payloads(add: Callable[..., object]) -> None:
    add(
        "--tensors",
        metavar="all|cut=RANKS|none",
        type=_tensors,
        default="all",
        help="payloads to keep: all, what a replay of exactly RANKS (0-3,8) needs from other ranks, or none; integers and "
        "those of 64 KiB or less are always kept (default: all)",
    )
    add(
        "--tensor-budget",
        metavar="BYTES",
        type=common.parse_bytes,
        default=2 << 30,
        help="from this size of their file on, keep only a summary of each (K, M, G, T: powers of 1024; default: 2G)",
    )


def _tensors(text: str) -> str | list[int]:
    if text in ("all", "none"):
        return text
    if text.startswith("cut="):
        return common.parse_ranks(text.removeprefix("cut="))
    raise argparse.ArgumentTypeError(f"{text!r} is not all, none, or cut=RANKS such as cut=0-3,8")


def _check_rules(options: argparse.Namespace) -> None:
    """PrismError: options that do not go together."""
    needing = [name for name in ("dedup", "explain_rules") if getattr(options, name)]
    if needing and options.rules is None:
        raise PrismError(f"--{needing[0].replace('_', '-')}: needs --rules RULES", status=2)
    if options.dedup and isinstance(options.tensors, list):
        raise PrismError("--tensors cut=: peers of RANKS need not run with --dedup; keep all, or none", status=2)
    if options.rules is not None and options.live:
        raise PrismError("--live: the peers are there; leave --rules out", status=2)
    if options.rules is not None and options.sends != "eager":
        raise PrismError("--sends rendezvous: with --rules no rank waits for another; leave it out", status=2)
    if options.explain_rules == (options.output is not None):
        which = "--explain-rules records nothing; leave it out" if options.output else "name a file for the graph"
        raise PrismError(f"-o: {which}", status=2)


def _record(options: argparse.Namespace) -> int:
    if options.live and {options.world_size, options.jobs, options.nodes, options.nproc_per_node} != {None}:
        many = "-n, -j, --nodes, --nproc-per-node"
        raise PrismError(f"--live: the command says how many ranks there are; leave {many} out", status=2)
    if options.live and (options.reduce_order, options.sends) != ("rank", "eager"):
        raise PrismError("--live: the real backends add and send; leave --reduce-order, --sends out", status=2)
    if options.live and options.pretend_cuda:
        raise PrismError("--live: the command runs on the devices that there are; leave --pretend-cuda out", status=2)
    if not options.live:
        options.world_size = common.setting(options.world_size, "PRISM_WORLD_SIZE")
        if options.world_size is None:
            raise PrismError("how many ranks? add -n W, or set PRISM_WORLD_SIZE", status=2)
    if options.command is None:
        raise PrismError("what shall run? add -- program [argument ...]", status=2)
    _check_rules(options)
    if options.output == "-":
        raise PrismError("-o -: standard output belongs to the program; name a file", status=2)
    if options.live:
        from prism_tools.record.live import record_live

        return record_live(options)
    options.jobs = common.setting(options.jobs, "PRISM_JOBS", "SLURM_CPUS_ON_NODE", default=os.cpu_count() or 1)
    options.nodes = common.setting(options.nodes, "PRISM_NODES", "SLURM_JOB_NUM_NODES", default=1)
    options.nproc_per_node = options.nproc_per_node or min(8, options.world_size)

    from prism_tools.record.run import record

    return record(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    return common.run(get_parser(), _record, sys.argv[1:] if argv is None else argv)
