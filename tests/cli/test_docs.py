"""README, man pages and completions say what the tools do now."""

import configparser
import importlib
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from prism_tools.cli import common

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("record", "slice", "calibrate", "replay", "inspect")


def code_lines(path):
    """Lines of the fenced blocks of a markdown file."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def tool_calls(lines):
    """Every call of a tool, alone or in a pipe: (tool, arguments)."""
    for line in lines:
        for call in line.split("|"):
            words = shlex.split(call, comments=True)
            if words and words[0].startswith("prism-"):
                yield words[0].removeprefix("prism-"), words[1:]


def readme_calls():
    return list(tool_calls(code_lines(ROOT / "README.md")))


def man_calls():
    parsers = [importlib.import_module(f"prism_tools.cli.{tool}").get_parser() for tool in TOOLS]
    return [call for parser in parsers for call in tool_calls(parser.man["EXAMPLES"].splitlines())]


@pytest.mark.parametrize("tool, argv", readme_calls() + man_calls())
def test_documented_command_is_accepted(tool, argv):
    module = importlib.import_module(f"prism_tools.cli.{tool}")
    if tool == "slice":
        argv = common.default_subcommand(argv, module.SUBCOMMANDS, "run")
    assert common.parse(module.get_parser(), argv).tool == f"prism-{tool}"


def test_every_tool_is_in_readme():
    assert {tool for tool, _ in readme_calls()} == set(TOOLS)


def test_documented_make_targets_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / ".ci/run").read_text()
    wanted = set(re.findall(r"(?:^|`)make ([\w-]+)", text, flags=re.M))
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {"demo", "test", "test-frameworks", "man"} <= wanted <= {name for rule in rules for name in rule.split()}


def test_files_named_in_readme_exist():
    section = (ROOT / "README.md").read_text().partition("## Read these files first")[2]
    files = re.findall(r"`([\w/.]+)`", section)
    assert len(files) == 5
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_files_named_in_the_rules_exist():
    text = (ROOT / "share/doc/prism/rules.md").read_text()
    files = re.findall(r"`((?:share|tests)/[\w/.]+)`", text)
    assert len(files) >= 3 and [name for name in files if not (ROOT / name).exists()] == []


def test_every_dependency_is_justified():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    packages = {re.split("[<>=]", line)[0] for line in listed.split()}
    table = re.findall(r"^\| ([\w, -]+?)(?: \(test\))? \| ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    assert packages == {name for row in table for name in row.split(", ")} - {"package"}


def test_generated_files_are_current():
    pytest.importorskip("argparse_manpage")
    pytest.importorskip("shtab")
    generate = runpy.run_path(str(ROOT / "share/generate.py"))
    assert generate["stale"]() == [], "run: make man completions"
    on_disk = {p for kind in generate["KINDS"].values() for p in (ROOT / "share" / kind).iterdir()}
    assert on_disk == set(generate["generated"]())


@pytest.mark.parametrize("tool", TOOLS)
def test_bash_completion_loads(tool):
    script = ROOT / f"share/bash-completion/completions/prism-{tool}"
    check = f"set -e; source {shlex.quote(str(script))}; complete -p prism-{tool}"
    result = subprocess.run(["bash", "-c", check], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith(f" prism-{tool}\n")


def test_man_page_sections():
    for tool in TOOLS:
        page = (ROOT / f"share/man/man1/prism-{tool}.1").read_text()
        sections = re.findall(r"^\.SH (.+)$", page, flags=re.M)
        assert sections[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
        assert sections[-3:] == ["EXAMPLES", "EXIT STATUS", "ENVIRONMENT"]
        assert re.search(rf"^prism\\-{tool} \\- .+$", page, flags=re.M)
