"""The report, whole."""

import numpy as np

from prism_tools.analyze.summary import summary
from prism_tools.graph.model import Memory
from tests.analyze.example import bare, calibrated, replayed
from tests.graph.builder import add_timing, build, comm, compute, step


def test_a_replayed_graph_says_everything():
    assert summary(replayed()) == (
        "world 2   program train.py --tp 2   backend gloo   iterations 3\n"
        "iteration time      solved 23.00 ms ± 0.0  (1 run of each slice)\n"
        "                    measured 31.55 ms ± 16.9  (2 iterations, traced)\n"
        "                    replayed 23.20 ms ± 0.2  (2 iterations, 2 late deliveries, 1 invalid left out)\n"
        "  critical path     compute 52.2 %  all_gather 21.7 %  all_reduce 8.7 %  waiting for rank 1: 17.4 %\n"
        "  where durations come from  real 100 %   probe 0 %   fit 0 %   emulated 0 %\n"
        "steady state        23.00 ms ± 0.0  every iteration from 0 on, if nothing varied\n"
        "  critical cycle    rank 1: train.py:8; rank 0: :1; rank 1: :2, :9\n"
        "peak memory         rank 0  1.92 GB   rank 1  1.90 GB   (RSS; CPU run)\n"
        "slowest member      rank 1 is last in 2 of 4 collectives, by 4 ms (train.py:8 forward)\n"
        "  slow span         rank 1 takes 4 ms more than its peers: train.py:9 step → :8 forward\n"
        "groups              1 created of 1   virtual ranks touched 0 of 0"
    )


def test_a_bare_graph_has_no_times():
    graph = bare()
    assert summary(graph) == (
        "world 2   program train.py --tp 2   backend gloo   iterations 3\n"
        "recorded            48 nodes in 1 program class, payloads none (0 B)"
    )
    add_timing(graph, {1: [(0, 0, 0, 1)] * 24}, slice_id=0)
    graph.complete = False
    assert summary(graph).splitlines()[1:] == [
        "incomplete          the recording stopped early; only what happened before is here",
        "recorded            48 nodes in 1 program class, payloads none (0 B)",
        "measured            ranks 1 of 2 in 1 slice",
    ]


def test_a_program_whose_name_has_blanks():
    graph = calibrated()
    graph.strings = [text.replace("train.py", "my train.py") for text in graph.strings]
    assert "\n  critical cycle    rank 1: my train.py:8; rank 0: :1; rank 1: :2, :9\n" in summary(graph)


def test_pretended_devices_are_told():
    graph = bare()
    graph.launch.device = "pretend-cuda"
    line = "devices             CUDA pretended on CPUs: no times, memory or overlap of a GPU are known"
    assert summary(graph).splitlines()[1] == line


def test_ranks_that_did_not_run_are_told():
    graph = build(32, {"w": list(range(32))}, lambda rank: [compute(), comm("barrier", "w"), step()])
    graph.ranks.ran = np.where(np.arange(32) == 5, 5, np.arange(32) % 4).astype(np.int32)
    line = "ran                 5 of 32 ranks, a sample: 27 are taken to do as one of these did: 0-3"
    assert summary(graph).splitlines()[1] == line
    graph.ranks.ran = np.arange(32, dtype=np.int32)
    assert "sample" not in summary(graph)
    every = replayed()
    every.ranks.ran = np.zeros(2, np.int32)
    assert (
        summary(every).splitlines()[1]
        == "ran                 1 of 2 ranks, a sample: 1 is taken to do as one of these did: 0"
    )


def test_balanced_ranks_have_no_slowest_member():
    text = summary(calibrated(late=0))
    assert "slowest" not in text and "waiting" not in text
    assert "  critical path     compute 63.2 %   all_gather 26.3 %   all_reduce 10.5 %\n" in text


def test_many_ranks_and_long_programs_stay_narrow():
    groups = {"mesh": [0, 1]}
    graph = build(6, groups, lambda rank: [compute(), comm("barrier", "mesh")] * (rank < 2) + [compute(), step()])
    graph.launch.argv = ["train.py", "--config", "x" * 200]
    graph.groups.desc, none = ["mesh_tp"], np.full(6, -1)
    graph.memory = Memory(np.arange(6), np.array([5, 7, 3, 4, 5, 6]) * 10**8, none, none, ["sliced"] * 6)
    lines = summary(graph).splitlines()
    assert lines[0].startswith("world 6 (TP 2)   program train.py --config xxx") and len(lines[0]) == 100
    assert lines[0].endswith("…   backend gloo   iterations 1")
    assert lines[-1] == ("peak memory         rank 1  700 MB is most of 6 ranks, rank 2  300 MB least   (RSS; CPU run)")
