"""Selectors: which nodes they mean, and what they say when they mean none."""

import re

import numpy as np
import pytest

from prism_tools.calibrate.selectors import Nodes, parse_selector
from prism_tools.errors import PrismError
from prism_tools.graph.match import find_matches
from tests.graph.builder import build, comm, compute, train4


@pytest.fixture(scope="module")
def nodes():
    graph = train4()
    graph.groups.desc = ["default_pg", "mesh_tp", "mesh_tp", "mesh_dp", "mesh_dp"]
    return Nodes(graph, find_matches(graph))


def rows(nodes, text):
    """The selected nodes of each rank that has some."""
    chosen = np.flatnonzero(nodes.select(parse_selector(text)))
    length = len(nodes.graph.program_of(0))
    found = {}
    for flat in chosen.tolist():
        found.setdefault(flat // length, []).append(flat % length)
    return found


# train4: 3 nodes, two iterations of 14 (compute 3, all_reduce tp 4, …, all_reduce dp 12, …), 3 nodes.
FIRST, SECOND = 3, 17
SPANS = [0, 2, *(k + n for k in (FIRST, SECOND) for n in (0, 2, 4, 8, 10, 12)), 31, 33]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("3", {3: SPANS}),
        ("rank=3,0", {0: SPANS, 3: SPANS}),
        ("kind=compute iteration=1 rank=2", {2: [SECOND + n for n in (0, 2, 4, 8, 10, 12)]}),
        ("op=all_reduce group=dp", {rank: [FIRST + 9, SECOND + 9] for rank in range(4)}),
        ("op=all_* group=tp1 iteration=0", {rank: [FIRST + 1, FIRST + 3] for rank in (2, 3)}),
        ("group=mesh_tp op=send,recv iteration=0", {rank: [FIRST + 5, FIRST + 6] for rank in range(4)}),
        ("op=all_reduce rank=1 group=tp iteration=0", {0: [FIRST + 1], 1: [FIRST + 1]}),
        ("at=train.py:7", {rank: [FIRST + 9, SECOND + 9] for rank in range(4)}),
        ("at=backward kind=compute rank=0", {0: [FIRST + 8, SECOND + 8]}),
        ("at=train.py:9 kind=mark,compute rank=0 iteration=0", {0: [FIRST + 12, FIRST + 13]}),
        (
            "lane=gloo rank=0 iteration=0",
            {0: [FIRST + 5, FIRST + 6, FIRST + 9], 1: [FIRST + 5, FIRST + 6], 2: [FIRST + 9]},
        ),
        ("kind=wait rank=0", {0: [FIRST + 7, FIRST + 11, SECOND + 7, SECOND + 11]}),
        ("'at=train.py:9 step' kind=mark rank=0", {0: [FIRST + 13, SECOND + 13]}),
    ],
)
def test_what_is_selected(text, wanted, nodes):
    assert rows(nodes, text) == wanted


@pytest.mark.parametrize(
    "text, reason",
    [
        ("op=barrier,all_to_all group=dp", "no node is all of this at once; see prism-inspect nodes"),
        ("op=gather", "the file has ops all_reduce, all_to_all, barrier, broadcast, recv, send"),
        ("group=ep", "the file has groups default_pg, dp, tp"),
        ("lane=stream*", "the file has lanes gloo, host"),
        ("7", "the file has ranks 0-3"),
        ("0-4", "the file has ranks 0-3"),
        ("rank=0-999999999999 kind=comm", "the file has ranks 0-3"),
        ("iteration=2-3", "the file has iterations 0-1"),
        (
            "at=other.py",
            "the file has call sites train.py:1 all_to_all, train.py:1 recv, train.py:1 send, train.py:11 main,",
        ),
    ],
)
def test_nothing_is_an_error_that_says_what_there_is(text, reason, nodes):
    with pytest.raises(PrismError, match=re.escape(f"{text!r} selects nothing: {reason}")):
        nodes.select(parse_selector(text))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("op=all_reduce,al_gather", "with al_gather: the file has ops all_reduce, all_to_all, barrier,"),
        ("rank=0,3,4", "with 4: the file has ranks 0-3"),
        ("0,2-5", "with 2-5: the file has ranks 0-3"),
        ("iteration=0,2", "with 2: the file has iterations 0-1"),
    ],
)
def test_a_slip_in_a_list_is_no_smaller_selection(text, reason, nodes):
    with pytest.raises(PrismError, match=re.escape(f"{text!r} selects nothing {reason}")):
        nodes.select(parse_selector(text))


def test_call_sites_in_folders():
    graph = build(1, {"w": [0]}, lambda rank: [compute(), comm("barrier", "w", at="models/gpt.py:41 forward")])
    nodes = Nodes(graph, find_matches(graph))
    for text in (
        "at=gpt.py",
        "at=gpt.py:41",
        "at=models/gpt.py",
        "at=models/*",
        "at=forward",
        "at=gpt.py,forward op=barrier",
    ):
        assert nodes.select(parse_selector(text)).tolist() == [False, True], text
    graph = build(1, {"w": [0]}, lambda rank: [compute(), comm("barrier", "w", at="my gpt.py:41 forward")])
    nodes = Nodes(graph, find_matches(graph))
    for text in ("'at=my gpt.py'", "'at=my gpt.py:41'", "at=forward", "'at=my gpt.py:41 forward'"):
        assert nodes.select(parse_selector(text)).tolist() == [False, True], text


def test_kinds_that_the_file_has():
    graph = build(1, {}, lambda rank: [compute()])
    with pytest.raises(PrismError, match="'kind=wait' selects nothing: the file has kinds compute$"):
        Nodes(graph, find_matches(graph)).select(parse_selector("kind=wait"))
    with pytest.raises(PrismError, match="'op=send' selects nothing: the file has ops none$"):
        Nodes(graph, find_matches(graph)).select(parse_selector("op=send"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "nothing is selected"),
        ("op", "'op' is no op=…, group=…, lane=…, rank=…, at=…, kind=… or iteration=…"),
        ("op=", "'op=' is no op=…"),
        ("at=a.py,", "'at=a.py,' has an empty value"),
        ("op=send op=recv", "op is given twice; write op=A,B"),
        ("3 rank=4", "rank is given twice"),
        ("rank=5-3", "'5-3' is no list of numbers such as 0-3,8"),
        ("kind=span", "no kind 'span'; there are compute, comm, wait, mark"),
        ("at='x", "No closing quotation"),
    ],
)
def test_what_is_no_selector(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_selector(text)
