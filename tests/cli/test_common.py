"""Flags, exit statuses, error lines, rank lists, settings and progress that the tools share."""

import argparse
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.cli import common
from prism_tools.errors import PrismError


def parser_with(**defaults):
    parser = common.new_parser("prism-test", "[options]", "Test.\n", "prism-test", {})
    parser.add_argument("file", nargs="?", default="-")
    parser.set_defaults(**defaults)
    return parser


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "text, ranks",
    [("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("8,0-1,1", [0, 1, 8]), ("5-5", [5]), (" 1, 2 ", [1, 2])],
)
def test_ranks(text, ranks):
    assert common.parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "0-", "1,,2", "0:3", "0-99999999999", "99999999999"])
def test_ranks_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no list of ranks such as 0-3,8"):
        common.parse_ranks(text)


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=20))
@settings(deadline=None)
def test_ranks_round_trip(ranks):
    assert common.parse_ranks(",".join(map(str, ranks))) == sorted(ranks)


@pytest.mark.parametrize(
    "text, size", [("0", 0), ("512", 512), ("64K", 65536), ("1.5m", 1572864), ("2G", 2 << 30), ("1TB", 1 << 40)]
)
def test_bytes(text, size):
    assert common.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "2X", "1 2"])
def test_bytes_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no size such as"):
        common.parse_bytes(text)


def test_setting_precedence(monkeypatch):
    monkeypatch.delenv("PRISM_JOBS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    variables = ("PRISM_JOBS", "SLURM_CPUS_ON_NODE")
    assert common.setting(None, *variables, default=5) == 5
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert common.setting(None, *variables, default=5) == 4
    monkeypatch.setenv("PRISM_JOBS", "3")
    assert common.setting(None, *variables, default=5) == 3
    assert common.setting(2, *variables, default=5) == 2
    monkeypatch.setenv("PRISM_JOBS", "many")
    with pytest.raises(PrismError, match="PRISM_JOBS: 'many' is no whole number >= 1") as caught:
        common.setting(None, *variables)
    assert caught.value.status == 2


def test_command_follows_double_dash():
    parser = parser_with(command=None)
    assert common.parse(parser, ["a.h5"]).command is None
    options = common.parse(parser, ["a.h5", "--", "-m", "train", "--", "-v"])
    assert (options.file, options.command, options.verbose) == ("a.h5", ["-m", "train", "--", "-v"], 0)
    assert options.argv == ["prism-test", "a.h5", "--", "-m", "train", "--", "-v"]


@pytest.mark.parametrize("argv, defaults", [(["--"], {"command": None}), (["--", "-m"], {"command": None})])
def test_command_missing(argv, defaults, capsys):
    with pytest.raises(SystemExit) as caught:
        common.parse(parser_with(**defaults), argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "prism-test: no program after --; see prism-test --help\n"


def test_command_not_taken(capsys):
    with pytest.raises(SystemExit) as caught:
        common.parse(parser_with(), ["--", "train.py"])
    assert caught.value.code == 2
    assert "nothing can follow --" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, filled",
    [
        (["a.h5", "-s", "2"], ["run", "a.h5", "-s", "2"]),
        (["plan", "a.h5"], ["plan", "a.h5"]),
        (["-v", "plan", "a.h5"], ["-v", "plan", "a.h5"]),
        (["-qvv", "a.h5"], ["-qvv", "run", "a.h5"]),
        (["--help"], ["--help"]),
        ([], ["run"]),
    ],
)
def test_default_subcommand(argv, filled):
    assert common.default_subcommand(argv, ("run", "plan"), "run") == filled


def failing(error):
    def body(options):
        raise error

    return body


@pytest.mark.parametrize(
    "error, status, text",
    [
        (PrismError("run.h5: no rank 12 (file has 0-7)"), 1, "prism-test: run.h5: no rank 12 (file has 0-7)\n"),
        (PrismError("x: y; z", status=2), 2, "prism-test: x: y; z\n"),
        (PrismError("deadlock", detail="rank 0\nrank 1\n"), 1, "prism-test: deadlock\nrank 0\nrank 1\n"),
        (FileNotFoundError(2, "No such file", "a.h5"), 1, "prism-test: a.h5: No such file\n"),
        (OSError("odd"), 1, "prism-test: odd\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(error, status, text, capsys):
    assert common.run(parser_with(), failing(error), []) == status
    assert capsys.readouterr() == ("", text)


def test_traceback_only_with_vv(capsys):
    assert common.run(parser_with(), failing(PrismError("bad")), ["-v"]) == 1
    assert capsys.readouterr().err == "prism-test: bad\n"
    assert common.run(parser_with(), failing(PrismError("bad")), ["-vv"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("\nprism-test: bad\n")


def test_status_of_body():
    assert common.run(parser_with(), lambda options: None, []) == 0
    assert common.run(parser_with(), lambda options: 137, []) == 137


def test_closed_pipe_is_quiet():
    """A reader that goes away ends the tool with 141 and no words."""
    code = (
        "import sys; from prism_tools.cli import common\n"
        "parser = common.new_parser('prism-test', '', 'Test.', '', {})\n"
        "sys.exit(common.run(parser, lambda options: [print('x' * 1000) for _ in range(10000)] and 0, []))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


def test_quiet_silences_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert common.run(parser_with(), lambda options: options.progress.say("hello"), ["-q"]) == 0
    assert sys.stderr.getvalue() == ""


def test_no_graph_to_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    common.check_output(SimpleNamespace(output="a.h5"))
    with pytest.raises(
        PrismError, match="^none/a.h5: cannot be written: No such file or directory; make its folder first$"
    ):
        common.check_output(SimpleNamespace(output="none/a.h5"))
    with pytest.raises(PrismError, match="standard output is a terminal; add -o FILE") as caught:
        common.check_output(SimpleNamespace(output="-"))
    assert caught.value.status == 2


@pytest.mark.parametrize(
    "owner, command, trust, argv",
    [
        (-1, None, False, ["train.py"]),
        (7, None, True, ["train.py"]),
        (7, ["mine.py"], False, ["mine.py"]),
        (7, None, False, None),
    ],
)
def test_program_of_another_user(owner, command, trust, argv):
    graph = SimpleNamespace(launch=SimpleNamespace(argv=["train.py"], foreign_owner=owner))
    options = SimpleNamespace(file="a.h5", command=command, trust=trust)
    if argv is None:
        with pytest.raises(PrismError, match="^a.h5: recorded program is owned by another user; add --trust"):
            common.choose_command(graph, options)
    else:
        common.choose_command(graph, options)
        assert (graph.launch.argv, graph.launch.foreign_owner) == (argv, -1)
