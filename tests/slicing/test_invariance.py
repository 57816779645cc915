"""The graph's own falsifier: whole graphs pass; one that lacks a single edge fails, and the node is named."""

import shutil

import numpy as np
import pytest

from prism_tools.graph import file
from prism_tools.graph.schema import Kind, Op
from tests.tools import run


@pytest.mark.parametrize(("world", "arguments"), [(4, ["--pp", "2"]), (8, ["--tp", "2", "--pp", "2"])])
def test_a_recorded_graph_passes(world, arguments, stages, tmp_path):
    bare = stages.recorded("gpt.py", *arguments, world=world)
    done = run("slice", "invariance", bare.path, "-s", 2, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("rank\tnode\tmoved_ms\twhat\n", "")


def without_a_wait_edge(graph, rank):
    """Deletes the edge from an asynchronous receive of iteration 2 to its wait; the wait, and the ranks that have it."""
    number = int(graph.ranks.program[rank])
    program = graph.programs[number]
    source, target = program.edges.T
    wanted = (program.kind[target] == Kind.WAIT) & (program.op[source] == Op.RECV) & (program.segment[source] == 2)
    edge = int(np.flatnonzero(wanted)[0])
    program.edges = np.delete(program.edges, edge, axis=0)
    return int(target[edge]), np.flatnonzero(graph.ranks.program == number).tolist()


def test_a_missing_wait_edge_is_found(stages, tmp_path):
    """Ranks 2 and 3, of the second stage, wait for activations from outside their slice; for longer than other processes may
    hold them up in any of the runs that have no delays."""
    recorded = stages.recorded("gpt.py", "--pp", "2", world=4).path
    graph = file.read(recorded)
    shutil.copy(recorded.parent / graph.payload.path, tmp_path)
    node, ranks = without_a_wait_edge(graph, 2)
    assert ranks == [2, 3]
    file.write(graph, tmp_path / "broken.h5")
    done = run("slice", "invariance", "broken.h5", "-s", 2, "--delay", 60, cwd=tmp_path, expect=1)
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header == ["rank", "node", "moved_ms", "what"]
    assert [(int(rank), int(number)) for rank, number, _, _ in rows] == [(2, node), (3, node)]
    for rank, _, moved, what in rows:
        assert 15 < float(moved) < 1000 and what.startswith(f"rank {rank} wait (gpt.py:")
    told = "2 nodes move with delays that they do not depend on: the graph misses edges"
    assert done.stderr == f"prism-slice: warning: {told}\n"
