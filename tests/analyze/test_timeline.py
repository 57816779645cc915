"""The picture: which rows it has, what it draws, and that a file comes out."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from prism_tools.analyze.timeline import ALONE, COLOURS, COMPUTE, MAIN, _bands, _bars, _rows, draw
from prism_tools.calibrate import calibrate
from prism_tools.errors import PrismError
from prism_tools.graph.model import Timeline
from prism_tools.graph.schema import Op
from prism_tools.record.live import live_graph, read_shards
from tests.analyze.example import bare, calibrated
from tests.graph.builder import build, comm, compute, wait


@pytest.mark.parametrize("ending, head", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture_comes_out(tmp_path, ending, head):
    path = tmp_path / f"picture.{ending}"
    draw(calibrated(), str(path), iteration=1)
    assert path.read_bytes().startswith(head)


def test_waiting_and_transfer_are_told_apart():
    graph = calibrated()
    bars, zero = _bars(graph, _rows(graph), 1)
    assert zero == 23_000_000
    host, other = (0.06, 0.64), (0.68, 0.94)  # bottom and top within rank 0's row
    rounded = {colour: [tuple(round(x, 3) for x in span) for span in spans] for colour, spans in bars.spans.items()}
    assert (14, 16, *host) in rounded[COLOURS[Op.ALL_REDUCE]]
    assert (17, 22, *other) in rounded[COLOURS[Op.ALL_GATHER]]
    assert (0, 10, *host) in rounded[COMPUTE]
    waiting = [tuple(round(x, 3) for x in span) for span in bars.waiting]
    assert (10, 14, *host) in waiting and (20, 22, *host) in waiting
    assert (0, 14, 1.06, 1.64) in [tuple(round(x, 3) for x in span) for span in bars.critical]
    assert bars.ops == {Op.ALL_REDUCE, Op.ALL_GATHER}


def test_overlapping_operations_lie_side_by_side():
    def nodes(rank):
        flying = [comm("barrier", "world", name=name, is_async=True) for name in "abc"]
        return [compute(), *flying, compute(), wait(*"abc"), compute()]

    program = build(1, {"world": [0]}, nodes).program_of(0)
    start, end = np.array([0, 10, 10, 20, 10, 30, 40]), np.array([10, 20, 40, 50, 30, 40, 50])
    bands = _bands(program.lane, 0, list(range(7)), start, end)
    assert [tuple(round(x, 2) for x in bands[node]) for node in range(1, 4)] == [
        (0.19, 0.32),
        (0.06, 0.19),
        (0.19, 0.32),
    ]
    assert bands[0] == MAIN and _bands(program.lane, 0, [0, 4], start, end) == {0: ALONE, 4: ALONE}


def many(ranks, timing_classes):
    """A world of equal programs with this many different timings; the critical path runs through rank 70."""
    graph = bare(ranks=ranks, iterations=1)
    nothing = np.zeros(len(graph.program_of(0)), np.int64)
    rows = (np.arange(ranks) % timing_classes).astype(np.int32)
    same = [nothing] * timing_classes
    graph.timeline = Timeline(rows, same, same, np.array([1]), 1, 0, np.array([[70, 0], [70, 1], [3, 2]]))
    return graph


def test_many_ranks_become_classes():
    by_timing = _rows(many(2000, 2))
    assert [(row.rank, len(row.ranks)) for row in by_timing] == [(70, 1000), (3, 1000)]
    by_program = _rows(many(2000, 2000))
    assert [(row.rank, len(row.ranks)) for row in by_program] == [(0, 1998), (3, 1), (70, 1)]
    assert [row.label() for row in by_program] == ["rank 0 for 1998: 0-2,4-69,71-1999", "rank 3", "rank 70"]
    assert [row.rank for row in _rows(many(64 + 7, 71))] == [0, 3, 70]
    assert len(_rows(calibrated())) == 2


def test_two_thousand_ranks_fit(tmp_path):
    path = tmp_path / "many.png"
    draw(many(2000, 2000), str(path))
    assert path.stat().st_size > 1000


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(PrismError, match="no timeline; run prism-calibrate"):
        draw(bare(), "never.png")
    with pytest.raises(PrismError, match=r"no iteration 3 \(file has 3"):
        draw(calibrated(), "never.png", iteration=3)


def test_streams_are_the_rows_of_a_rank_with_a_device():
    """The host of a small pipeline on two GPUs runs ahead beside them: it is not drawn, and the picture begins without it."""
    golden = Path(__file__).parents[1] / "golden" / "live" / "interleaved"
    graph = calibrate(live_graph(read_shards(golden), argparse.Namespace(warmup=3, iterations=2)))
    rows = _rows(graph)
    bars, zero = _bars(graph, rows, 4)
    lane = graph.program_of(0).lane
    nodes = np.flatnonzero((graph.program_of(0).segment == 4) & (lane > 0))
    assert {graph.lanes[k] for k in lane[nodes]} == {"stream 0", "nccl 0"}
    starts = [graph.timeline.start[graph.timeline.row[r]][(graph.program_of(r).segment == 4) & (graph.program_of(r).lane > 0)]
              for r in (0, 1)]  # fmt: skip
    assert zero == min(start.min() for start in starts)
    assert {span[3] for span in bars.spans[COMPUTE]} >= {MAIN[1], 1 + MAIN[1]}
