"""What the five tools share: flags, exit statuses, error lines, rank lists, settings, progress. Light to import."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from prism_tools import __version__
from prism_tools.cli.progress import Progress
from prism_tools.errors import PrismError
from prism_tools.graph.schema import UNKNOWN

if TYPE_CHECKING:
    from prism_tools.graph.model import Graph

LIBRARIES = ("numpy", "h5py", "torch", "matplotlib")
EXIT_STATUS = "0 success; 1 failure; 2 wrong usage; 130 interrupted; 141 the reader of standard output went away."
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
MOST_RANKS = 2**24  # of a list that is spelt out: a slip must not take all memory
PAIR = 2  # nodes of a job: one for the assistant, one for the sandbox ranks
NODES = {"PRISM_NODES, SLURM_JOB_NUM_NODES": "nodes, without --nodes"}
SPOOL = {
    "SLURM_TMPDIR, TMPDIR": "where a graph that comes from or goes to a pipe is spooled (HDF5 needs a seekable file)"
}


class Parser(argparse.ArgumentParser):
    """One tool's (or subcommand's) parser; its errors are one line.

    ``man``: further sections of the man page, heading -> text; EXAMPLES is also shown by --help.
    """

    man: dict[str, str]

    def __init__(self, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(**settings)
        self.color = False
        self.man = {}

    def error(self, message: str) -> NoReturn:
        """Print ``message`` after the tool's name and exit with status 2."""
        self.exit(2, f"{self.prog.split()[0]}: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """--version: one line; after -v also Python and the libraries, from their metadata, without importing them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> NoReturn:
        lines = [f"{parser.prog.split()[0]} {__version__}"]
        if getattr(namespace, "verbose", 0):
            from importlib.metadata import PackageNotFoundError, version

            lines.append(f"python {sys.version.split()[0]}")
            for name in LIBRARIES:
                try:
                    lines.append(f"{name} {version(name)}")
                except PackageNotFoundError:
                    lines.append(f"{name} not installed")
        print("\n".join(lines))
        parser.exit(0)


def new_parser(
    prog: str, usage: str, description: str, examples: str, environment: dict[str, str], exit_status: str = EXIT_STATUS
) -> Parser:
    """A tool's parser with the shared flags.

    ``usage``: what follows the tool's name; ``description``: its first line is the man page's NAME;
    ``examples``: one command a line; ``environment``: variable -> meaning.
    """
    parser = Parser(
        prog=prog, usage=f"%(prog)s {usage}", description=description, epilog="examples:\n" + _indent(examples)
    )
    parser.man = {
        "EXAMPLES": examples,
        "EXIT STATUS": exit_status,
        "ENVIRONMENT": "\n".join(f"{name}: {meaning}" for name, meaning in environment.items()),
    }
    add_shared(parser)
    parser.set_defaults(verbose=0, quiet=False)
    return parser


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add -q, -v and --version. Without a default of their own, so that a subcommand keeps what stood before it."""
    absent = argparse.SUPPRESS
    parser.add_argument("-q", "--quiet", action="store_true", default=absent, help="show no progress")
    parser.add_argument("-v", "--verbose", action="count", default=absent, help="say more; -vv: traceback of an error")
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=absent,
        help="print the version (after -v: libraries too) and exit",
    )


def add_file(parser: argparse.ArgumentParser, *names: str, **settings: Any) -> None:
    """Add an argument that is a file, and tell the completions so."""
    argument = parser.add_argument(*names, **settings)
    argument.complete = "file"  # type: ignore[attr-defined]


def add_input(parser: argparse.ArgumentParser) -> None:
    """Add the graph to read: FILE, standard input by default."""
    add_file(parser, "file", metavar="FILE", nargs="?", default="-", help="graph to read (default: -, standard input)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add -o/--output of a tool that writes a graph: standard output by default."""
    help_ = "write the graph to FILE (default: -, standard output)"
    add_file(parser, "-o", "--output", metavar="FILE", default="-", help=help_)


def add_command(parser: argparse.ArgumentParser, recorded: bool = True) -> None:
    """Let the tool take ``-- program [argument ...]``; ``recorded``: it replaces a recorded one, guarded by --trust."""
    parser.set_defaults(command=None)
    if recorded:
        parser.add_argument(
            "--trust", action="store_true", help="run the recorded program even if another user owns the file"
        )


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Let the tool's sandbox ranks run on other nodes than its assistant."""
    help_ = (
        "nodes of the Slurm allocation: the assistant has the first, the ranks the others; 2N: N assistants, and N for "
        "the ranks (default: all; 1: this machine)"
    )
    parser.add_argument("--nodes", metavar="N", type=positive, help=help_)


def add_slurm(parser: argparse.ArgumentParser) -> None:
    """Let the tool hand its work to Slurm."""
    help_ = "run as jobs of Slurm, of --nodes each (default: 2), and wait; when repeated, take up jobs and parts that are there"
    parser.add_argument("--slurm", action="store_true", help=help_)
    help_ = (
        "the site's options of sbatch, such as --slurm-args='--partition=gpu --time=60'; with two kinds of nodes "
        "'--partition=cpu : --partition=gpu': the assistant's, the ranks'"
    )
    parser.add_argument("--slurm-args", metavar="ARGS", type=words, default=None, help=help_)


def uses_slurm(options: argparse.Namespace) -> bool:
    """Whether Slurm shall do the work. PrismError: it cannot."""
    if not options.slurm:
        if options.slurm_args is not None:
            raise PrismError("--slurm-args: is for jobs; add --slurm", status=2)
        return False
    from prism_tools.launch import jobs

    jobs.check(options.file, options.output, options.slurm_args or [])
    check_output(options)
    options.places = ["--nodes", str(options.nodes)] if options.nodes else []  # of the job's command
    options.nodes = options.nodes or PAIR
    options.progress.log = not options.quiet
    return True


def recorded_program(options: argparse.Namespace) -> list[str]:
    """What a job's command needs at its end so as to run the program that these options run."""
    return [*(["--trust"] if options.trust else []), *(["--", *options.command] if options.command else [])]


def this_tool() -> list[str]:
    """The command that runs this tool again."""
    return [sys.executable, os.path.abspath(sys.argv[0])]


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Options of ``argv``; what follows the first "--" becomes ``options.command`` (a list; None without "--")."""
    arguments = list(argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    if cut < len(arguments):
        if not hasattr(options, "command"):
            parser.error("nothing can follow -- here")
        options.command = arguments[cut + 1 :]
        if options.command in ([], ["-m"]):
            parser.error("no program after --")
    options.tool = parser.prog
    options.argv = [parser.prog, *arguments]
    return options


def default_subcommand(argv: Sequence[str], names: Sequence[str], default: str) -> list[str]:
    """``argv`` with ``default`` put in after leading shared flags, unless one of ``names`` or -h stands there."""
    place = next(
        (k for k, word in enumerate(argv) if not re.fullmatch(r"-[qv]+|--quiet|--verbose|--version", word)), len(argv)
    )
    if place < len(argv) and argv[place] in (*names, "-h", "--help"):
        return list(argv)
    return [*argv[:place], default, *argv[place:]]


def run(parser: Parser, body: Callable[[argparse.Namespace], int | None], argv: Sequence[str]) -> int:
    """Parse ``argv``, call ``body(options)`` and return the exit status; errors become lines on stderr.

    ``options`` also carries ``tool`` (its name), ``argv`` (the command line) and ``progress`` (a Progress).
    """
    progress = Progress(parser.prog)
    verbose = 0
    for number in STOPS:  # end as if the body had failed: nothing is left behind
        signal.signal(number, _stop)
    try:
        options = parse(parser, argv)
        verbose = options.verbose
        progress.live = progress.live and not options.quiet
        options.progress = progress
        status = body(options) or 0
        sys.stdout.flush()  # a full disk is an error of this tool
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return 141
    except (PrismError, OSError) as error:
        progress.clear()
        return _report(parser.prog, error, verbose)
    finally:
        progress.clear()


def _stop(number: int, _: Any) -> NoReturn:
    for other in STOPS:  # make and Slurm repeat themselves: what cleans up is not interrupted again
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _report(tool: str, error: PrismError | OSError, verbose: int) -> int:
    """Print the error's line (and detail) on stderr; return the exit status."""
    if verbose > 1:
        traceback.print_exc()
    if isinstance(error, PrismError):
        print("\n".join(filter(None, [f"{tool}: {error}", error.detail.rstrip()])), file=sys.stderr)
        return error.status
    where = f"{error.filename}: " if error.filename else ""
    print(f"{tool}: {where}{error.strerror or error}", file=sys.stderr)
    return 1


def parse_ranks(text: str) -> list[int]:
    """Ranks of a list as Slurm writes it: "0-3,8" -> [0, 1, 2, 3, 8], sorted, each once."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match or not int(match[1]) <= int(match[2] or match[1]) < MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks such as 0-3,8")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(ranks)


def parse_bytes(text: str) -> int:
    """A size in bytes: "512", "64K", "1.5G"; K, M, G and T are powers of 1024, as in Slurm."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))


def positive(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 0")
    return int(text)


def words(text: str) -> list[str]:
    """Words of a command line, as a shell would divide it."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def setting(
    flag: int | None, *variables: str, default: int | None = None, kind: Callable[[str], int] = positive
) -> int | None:
    """The flag's value, else that of the first of the environment's ``variables`` that is set, else ``default``."""
    if flag is not None:
        return flag
    for name in variables:
        if text := os.environ.get(name):
            try:
                return kind(text)
            except argparse.ArgumentTypeError as error:
                raise PrismError(f"{name}: {error}", status=2) from None
    return default


def read_graph(options: argparse.Namespace) -> Graph:
    """The graph that the tool was given."""
    from prism_tools.graph import file

    return file.read(options.file, partial=getattr(options, "partial", False))


def check_output(options: argparse.Namespace) -> None:
    """PrismError if the graph would be written to a terminal, or cannot be written; call it before long work."""
    if options.output == "-" and sys.stdout.isatty():
        raise PrismError("standard output is a terminal; add -o FILE, or a pipe", status=2)
    from prism_tools.graph.stream import check_place

    check_place(options.output)


def write_graph(graph: Graph, options: argparse.Namespace) -> None:
    """Add the tool to the graph's provenance and write the graph where the options say."""
    from prism_tools.graph import file, provenance

    provenance.append(graph, options.tool, options.argv)
    if graph.payload.path:  # relative to the graph; through a pipe absolute
        folder = "" if options.file == "-" else os.path.dirname(options.file)
        path = os.path.abspath(os.path.join(folder, graph.payload.path))
        piped = options.output == "-"
        graph.payload.path = path if piped else os.path.relpath(path, os.path.dirname(os.path.abspath(options.output)))
    file.write(graph, options.output)


def choose_command(graph: Graph, options: argparse.Namespace) -> None:
    """Let ``-- command`` replace the recorded program; PrismError if that is another user's and not trusted."""
    if options.command:
        graph.launch.argv = options.command
    elif graph.launch.foreign_owner >= 0 and not options.trust:
        remedy = "add --trust to run it, or give -- command"
        raise PrismError(f"{options.file}: recorded program is owned by another user; {remedy}")
    graph.launch.foreign_owner = UNKNOWN


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
