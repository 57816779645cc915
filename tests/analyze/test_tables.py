"""Tables of the example, their filters, and the three ways of spelling them."""

import json

import pytest

from prism_tools.analyze.group_table import groups
from prism_tools.analyze.tables import nodes, ranks
from prism_tools.analyze.text import brief, cut, milliseconds, percent, render, size, with_interval
from prism_tools.errors import PrismError
from tests.analyze.example import MS, bare, calibrated, replayed
from tests.graph.builder import build, comm, compute


def test_ranks():
    rows = ranks(replayed())
    assert rows[0] == {
        "rank": 0, "class": 0, "nodes": 24, "collectives": 6, "send_recv": 0, "bytes": 13200,
        "compute_ns": 15 * MS, "comm_ns": 7 * MS, "wait_ns": 6 * MS, "rss_bytes": 9 * 10**9,
    }  # fmt: skip
    assert (rows[1]["compute_ns"], rows[1]["wait_ns"]) == (19 * MS, 2 * MS)
    assert set(ranks(bare())[0]) == {"rank", "class", "nodes", "collectives", "send_recv", "bytes"}
    first = ranks(calibrated(), ranks=[1], iteration=0)
    assert [(row["rank"], row["nodes"], row["compute_ns"]) for row in first] == [(1, 8, 19 * MS)]


def test_groups():
    (row,) = groups(calibrated(), iteration=1)
    assert row == {
        "group": "world", "backend": "gloo", "size": 2, "operations": 2, "mostly": "all_reduce", "bytes": 8800,
        "comm_ns": 7 * MS, "wait_ns": 2 * MS, "last_rank": 1, "last_times": 1, "members": "0-1",
    }  # fmt: skip
    assert groups(calibrated(), op="barrier") == []
    assert "comm_ns" not in groups(bare())[0]


def test_nodes():
    rows = nodes(calibrated(), ranks=[0], op="all_reduce", group="world", iteration=1, kind="comm")
    assert list(rows) == [
        {
            "rank": 0, "node": 9, "iteration": 1, "kind": "comm", "op": "all_reduce", "group": "world", "peer": None,
            "bytes": 4000, "dtype": "float32", "start_ns": 33 * MS, "wait_ns": 4 * MS, "end_ns": 39 * MS,
            "source": "real", "callsite": "train.py:8 forward",
        }
    ]  # fmt: skip
    assert len(list(nodes(calibrated(), kind="wait"))) == 6
    with pytest.raises(PrismError, match="no rank 12"):
        nodes(bare(), ranks=[12])
    with pytest.raises(PrismError, match=r"no group dp \(file has world\)"):
        nodes(bare(), group="dp")


def test_peers_and_roots_are_global_ranks():
    def program(rank):
        pair = [compute(), comm("send" if rank == 3 else "recv", "odd", 4, peer=4 - rank)] if rank in (1, 3) else []
        return [compute(), comm("broadcast", "world", 4, root=2), *pair, compute()]

    rows = nodes(build(4, {"world": [0, 1, 2, 3], "odd": [1, 3]}, program), kind="comm")
    assert [(row["rank"], row["op"], row["peer"]) for row in rows] == [
        (0, "broadcast", 2), (1, "broadcast", 2), (1, "recv", 3), (2, "broadcast", 2), (3, "broadcast", 2),
        (3, "send", 1),
    ]  # fmt: skip


def test_three_spellings():
    rows = [
        {"rank": 0, "op": "barrier", "wait_ns": 1_500_000, "bytes": 4096},
        {"rank": 10, "op": None, "wait_ns": 0, "bytes": 0},
    ]
    assert render(rows) == (
        "rank  op       wait ms    bytes\n"
        "   0  barrier    1.500  4.10 KB\n"
        "  10  -         0.0000      0 B\n"
    )  # fmt: skip
    assert render(rows, "tsv") == "rank\top\twait_ns\tbytes\n0\tbarrier\t1500000\t4096\n10\t\t0\t0\n"
    assert json.loads(render(rows, "json")) == rows
    assert render([]) == "" and json.loads(render([], "json")) == []


def test_numbers_have_units_and_sense():
    assert [milliseconds(ns) for ns in (0, 999, 1_234_567, 182_412_345, 12_345_678_901)] == [
        "0.0000", "0.0010", "1.235", "182.41", "12,345.68",
    ]  # fmt: skip
    assert with_interval(182_412_345, 612_345) == "182.41 ms ± 0.6"
    assert with_interval(1_234_567, 12_345) == "1.235 ms ± 0.01"
    assert [size(n) for n in (0, 999, 1000, 9_996, 99_960, 999_500, 1_920_000_000, 3e15)] == [
        "0 B", "999 B", "1.00 KB", "10.0 KB", "100 KB", "1.00 MB", "1.92 GB", "3,000 TB",
    ]  # fmt: skip
    assert [brief(ns) for ns in (4_123_456, 123_456, 41_000_000)] == ["4.1", "0.12", "41"]
    assert percent(1, 8) == "12.5 %" and percent(1, 0) == "0.0 %"
    assert cut("abcdef", 4) == "abc…" and cut("abcd", 4) == "abcd"
