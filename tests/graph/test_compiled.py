"""Kernels: compiled code gives what plain Python gives, and is kept in the user's cache folder."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prism_tools.graph import compiled
from prism_tools.graph.classes import classes_of, everybody
from prism_tools.graph.match import find_matches
from tests.bench import clusters
from tests.graph.builder import differences
from tests.graph.test_classes import solved

GRAPH = """
from prism_tools.graph import compiled
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from tests.graph.builder import train4
compiled.SMALL = 0
graph = train4()
print(len(dependency_order(graph, find_matches(graph)).steps))
"""


@pytest.mark.parametrize("overlap", [False, True])
def test_compiled_code_gives_what_plain_python_gives(monkeypatch, overlap):
    graph = clusters.build(clusters.Cluster(tp=2, pp=3, dp=4, ep=2, overlap=overlap))
    durations = clusters.durations(graph, np.arange(graph.world_size))
    for classes in (everybody(graph), classes_of(graph, np.zeros(graph.world_size))):
        monkeypatch.setattr(compiled, "SMALL", 10**9)
        plain = solved(graph, durations, classes)[0]
        monkeypatch.setattr(compiled, "SMALL", 0)
        assert differences(plain, solved(graph, durations, classes)[0]) == []
        assert len(find_matches(graph, classes=classes).base) == len(classes) + 1


def test_compiled_code_is_kept_where_it_can_be(tmp_path):
    root = Path(__file__).resolve().parents[2]

    def run(cache):
        env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"XDG_CACHE_HOME": str(cache)}
        command = [sys.executable, "-c", GRAPH]
        return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=True).stdout

    expected = run(tmp_path)
    kept = list((tmp_path / "prism-tools" / "numba").rglob("order._in_order-*"))
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    assert run("/proc/no folder can be made here") == expected
    assert not list((root / "prism_tools").rglob("*.nbi"))


def test_small_graphs_do_without_numba():
    code = GRAPH.replace("compiled.SMALL = 0", "") + "import sys; assert 'numba' not in sys.modules"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
