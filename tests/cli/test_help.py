"""What the tools say about themselves, and the options they take: all of them pinned here."""

import importlib
import subprocess
import sys

import pytest

from prism_tools import __version__

HEAVY = ["torch", "h5py", "numba", "mpi4py", "matplotlib", "numpy", "submitit"]
SHARED = "--quiet --verbose --version"
OPTIONS = {
    "record": "--world-size --jobs --nodes --output --live --nproc-per-node --warmup --iterations --reduce-order --sends "
    "--pretend-cuda --tensors --tensor-budget --rules --dedup --explain-rules",
    "slice": "",
    "slice run": "file --size --cover --output --ranks --index --repeat --passes --parallel --force --no-probe --nodes "
    "--slurm --slurm-args --trust",
    "slice plan": "file --size --cover",
    "slice merge": "files --output",
    "slice probe": "file --size --cover --output --repeats --nodes",
    "slice invariance": "file --size --delay --seed --trust",
    "calibrate": "file --output --realign --scale --set --delay --ideal",
    "replay": "file --ranks --output --scale --set --delay --nodes --slurm --slurm-args --trust",
    "inspect": "",
    "inspect summary": "file --partial",
    "inspect ranks": "file --partial --format",
    "inspect groups": "file --partial --format",
    "inspect nodes": "file --partial --format --rank --op --group --iteration --kind",
    "inspect payloads": "file --partial --format --verify",
    "inspect check": "file --partial",
    "inspect timeline": "file --partial --output --iteration",
}
TOOLS = [name for name in OPTIONS if " " not in name]


def module(tool):
    return importlib.import_module(f"prism_tools.cli.{tool}")


def subparsers(parser):
    return next((action.choices for action in parser._actions if isinstance(action.choices, dict)), {})


def option_list(parser):
    names = [(action.option_strings or [action.dest])[-1] for action in parser._actions]
    return {name for name in names if name not in ("--help", "==SUPPRESS==")}


def test_option_lists():
    found = {}
    for tool in TOOLS:
        parser = module(tool).get_parser()
        found[tool] = option_list(parser)
        found.update({f"{tool} {name}": option_list(child) for name, child in subparsers(parser).items()})
    assert found == {name: set(f"{SHARED} {text}".split()) for name, text in OPTIONS.items()}


def test_short_options():
    letters = {
        "--output": "-o",
        "--quiet": "-q",
        "--verbose": "-v",
        "--size": "-s",
        "--force": "-f",
        "--jobs": "-j",
        "--world-size": "-n",
    }
    for tool in TOOLS:
        parser = module(tool).get_parser()
        for action in [a for p in (parser, *subparsers(parser).values()) for a in p._actions]:
            if action.option_strings and action.option_strings[-1] in letters:
                assert action.option_strings[0] == letters[action.option_strings[-1]]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("flags", [["--help"], ["--version"], ["-v", "--version"]])
def test_light(tool, flags):
    """Help and versions import no library."""
    code = (
        f"import sys; from prism_tools.cli.{tool} import main\n"
        f"try: main({flags})\n"
        f"except SystemExit as end: sys.exit(end.code or ' '.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    if flags == ["--help"]:
        assert result.stdout.startswith(f"usage: prism-{tool} ") and "examples:\n  prism-" in result.stdout
    else:
        assert result.stdout.splitlines()[0] == f"prism-{tool} {__version__}"
        assert len(result.stdout.splitlines()) == (1 if len(flags) == 1 else 6)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_help(name):
    tool, *sub = name.split()
    parser = module(tool).get_parser()
    parser = subparsers(parser)[sub[0]] if sub else parser
    assert parser.description
    assert all(action.help for action in parser._actions if not isinstance(action.choices, dict))
    assert max(map(len, parser.format_help().splitlines())) <= 100


def usage_error(capsys, tool, *argv):
    """Status and stderr of a wrong call, whether argparse or the tool refuses it."""
    try:
        status = module(tool).main(list(argv))
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["record", "-o", "a.h5", "--", "t.py"], "prism-record: how many ranks? add -n W, or set PRISM_WORLD_SIZE\n"),
        (["record", "-n", "2", "-o", "a.h5"], "prism-record: what shall run? add -- program [argument ...]\n"),
        (
            ["record", "-n", "2", "-o", "-", "--", "t.py"],
            "prism-record: -o -: standard output belongs to the program; name a file\n",
        ),
        (
            ["record", "--live", "-n", "2", "-o", "a.h5", "--", "torchrun", "t.py"],
            "prism-record: --live: the command says how many ranks there are; leave -n, -j, --nodes, --nproc-per-node out\n",
        ),
        (
            ["record", "--live", "--pretend-cuda", "-o", "a.h5", "--", "torchrun", "t.py"],
            "prism-record: --live: the command runs on the devices that there are; leave --pretend-cuda out\n",
        ),
        (
            ["record", "-n", "0", "-o", "a"],
            "prism-record: argument -n/--world-size: '0' is no whole number >= 1; see prism-record --help\n",
        ),
        (
            ["slice", "a.h5"],
            "prism-slice: the following arguments are required: -s/--size; see prism-slice run --help\n",
        ),
        (
            ["slice", "plan", "a", "-s", "2", "--", "x"],
            "prism-slice: nothing can follow -- here; see prism-slice --help\n",
        ),
        (
            ["replay", "-r", "3-1", "a.h5"],
            "prism-replay: argument -r/--ranks: '3-1' is no list of ranks such as 0-3,8; see prism-replay --help\n",
        ),
        (
            ["slice", "a.h5", "-s", "2", "-o", "b.h5", "--slurm-args=-p gpu"],
            "prism-slice: --slurm-args: is for jobs; add --slurm\n",
        ),
        (
            ["replay", "-r", "0", "a.h5", "-o", "b.h5", "--slurm", "--slurm-args=-p a : -p b : -p c"],
            "prism-replay: --slurm-args: one ':' divides the assistant's options from the ranks'; leave the others out\n",
        ),
        (
            ["replay", "-r", "0", "a.h5", "--slurm", "--slurm-args='"],
            'prism-replay: argument --slurm-args: "\'": No closing quotation; see prism-replay --help\n',
        ),
        (
            ["calibrate", "--scale", "op=send=2ms", "a.h5"],
            "prism-calibrate: argument --scale: 'op=send=2ms': '2ms' is no factor such as 0.8;"
            " see prism-calibrate --help\n",
        ),
        (
            ["calibrate", "--set", "3=9999999999s", "a.h5"],
            "prism-calibrate: argument --set: '3=9999999999s': '9999999999s' is no time such as 2ms;"
            " see prism-calibrate --help\n",
        ),
        (
            ["replay", "-r", "0", "--delay", "bank=3=2ms", "a.h5"],
            "prism-replay: argument --delay: 'bank=3=2ms': 'bank=3' is no op=…, group=…, lane=…, rank=…, at=…, kind=… or"
            " iteration=…; see prism-replay --help\n",
        ),
        (
            ["inspect", "timeline", "a.h5", "-o", "a.gif"],
            "prism-inspect: argument -o/--output: a.gif: end the name in .png, .svg or .pdf;"
            " see prism-inspect timeline --help\n",
        ),
    ],
)
def test_usage_errors(argv, message, capsys, monkeypatch):
    monkeypatch.delenv("PRISM_WORLD_SIZE", raising=False)
    assert usage_error(capsys, *argv) == (2, message)


def test_slice_runs_by_default():
    from prism_tools.cli import common, slice

    def parse(*argv):
        return common.parse(slice.get_parser(), common.default_subcommand(argv, slice.SUBCOMMANDS, "run"))

    options = parse("-v", "bare.h5", "-s", "2", "--ranks", "0-3", "--", "train.py", "-s", "9")
    assert (options.body, options.file, options.size, options.ranks) == (slice._run, "bare.h5", 2, [0, 1, 2, 3])
    assert (options.command, options.verbose, options.output) == (["train.py", "-s", "9"], 1, "-")
    assert parse("plan", "-s", "4").body == slice._plan
    assert parse("plan", "-s", "4").file == "-"
