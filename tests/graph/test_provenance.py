"""The chain of tools, and the names of things."""

import platform
import socket

import numpy as np

from prism_tools import __version__
from prism_tools.graph.names import node_text, ranks_text
from prism_tools.graph.provenance import append, environment
from tests.graph.builder import build, comm, compute, step, train4, wait


def test_rows_chain_and_repeat():
    graph = train4()
    append(graph, "prism-record", ["-o", "a b.h5"])
    append(graph, "prism-slice", [])
    append(graph, "prism-slice", ["-r", "0"])
    assert graph.provenance == [
        {"id": "prism-record", "prev": "", "tool": "prism-record", "version": __version__, "argv": "-o 'a b.h5'"},
        {"id": "prism-slice", "prev": "prism-record", "tool": "prism-slice", "version": __version__, "argv": ""},
        {"id": "prism-slice.2", "prev": "prism-slice", "tool": "prism-slice", "version": __version__, "argv": "-r 0"},
    ]


def test_environment_names_host_versions_and_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    found = environment()
    assert (found["host"], found["python"]) == (socket.gethostname(), platform.python_version())
    assert found["numpy"] == np.__version__ and found["torch"].startswith("2.")
    assert "SLURM_JOB_ID" not in found
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert environment()["SLURM_JOB_ID"] == "77"


def test_ranks_are_written_as_slurm_does():
    cases = {(): "none", (3,): "3", (0, 1, 2, 3, 8): "0-3,8", (5, 1, 4, 1): "1,4-5", (0, 2): "0,2"}
    assert {ranks: ranks_text(ranks) for ranks in cases} == cases


def test_nodes_are_named_by_what_they_do():
    nodes = [compute(), comm("all_reduce", "w", at="a.py:4 f"), wait(at="a.py:5 f"), step()]
    graph = build(1, {"w": [0]}, lambda rank: nodes)
    assert [node_text(graph, 0, n) for n in range(4)] == [
        "rank 0 compute (node 0)",
        "rank 0 all_reduce on w (a.py:4 f)",
        "rank 0 wait (a.py:5 f)",
        "rank 0 optimizer_step (train.py:9 step)",
    ]
