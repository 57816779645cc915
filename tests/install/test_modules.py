"""module load puts the tools, their manual and the make rules on the paths; module unload takes them off again."""

import json
import subprocess
import sys

import pytest

from prism_tools import __version__
from tests.install.tree import bare_environment

SHOW = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"


@pytest.fixture(params=["lmod", "tcl"])
def shell(request, modules, installed, tmp_path):
    """Runs lines of bash in which ``module`` is there; returns (environment at the end, what was said)."""

    def run(lines, **more):
        function = f'module() {{ eval "$("${{MODULECMD[@]}}" "$@")"; }}\nmodule use "{installed}/share/modulefiles"\n'
        command = " ".join(f'"{word}"' for word in modules[request.param])
        done = subprocess.run(
            ["bash", "--norc", "-c", f"MODULECMD=({command})\n{function}{lines}\n{SHOW}"],
            env=bare_environment(HOME=str(tmp_path), PATH="/usr/bin:/bin", **more),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        *said, last = done.stdout.splitlines()
        return json.loads(last), "\n".join(said) + done.stderr

    return run


def test_load_and_unload(shell, installed):
    before, _ = shell("")
    loaded, said = shell(f"module load prism-tools/{__version__}; prism-record --version; type -p prism-inspect")
    assert said.splitlines() == [f"prism-record {__version__}", f"{installed}/bin/prism-inspect"]
    assert loaded["PATH"] == f"{installed}/bin:{before['PATH']}"
    manual, end, rest = loaded["MANPATH"].partition(":")
    assert (manual, end, rest.strip(":")) == (f"{installed}/share/man", ":", "")  # an empty end: the system's pages
    assert loaded["PRISM"] == f"{installed}/share/prism"
    after, _ = shell("module load prism-tools; module unload prism-tools")
    assert (after["PATH"], after.get("PRISM"), after.get("MANPATH", "")) == (before["PATH"], None, "")


def test_other_manuals_stay(shell, installed):
    loaded, _ = shell("module load prism-tools", MANPATH="/opt/other/man")
    assert loaded["MANPATH"].startswith(f"{installed}/share/man:/opt/other/man:")


def test_what_it_says(shell):
    _, said = shell("module avail prism-tools; module whatis prism-tools; module help prism-tools")
    assert f"prism-tools/{__version__}" in said and "training job of W ranks" in said and "man prism-record" in said
    assert "rror" not in said
