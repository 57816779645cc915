"""The store's changes by absent ranks come in the recording's order among the sandbox's own."""

import numpy as np

from prism_tools.capture.kv import KeyValue
from prism_tools.emulate.absent import AbsentChanges
from prism_tools.graph.model import StoreLog

ROWS = [
    (1, "set", "early", b"x"),
    (0, "add", "sum", b"1"),
    (1, "add", "sum", b"2"),
    (3, "delete_key", "early", b""),
    (2, "add", "sum", b"4"),
    (3, "set", "all", b"here"),
    (0, "set", "last", b"y"),
]


def log(rows=ROWS):
    ranks, functions, keys, values = zip(*rows, strict=True)
    return StoreLog(np.array(ranks, np.int32), list(functions), list(keys), list(values))


def sandbox_calls(store, absent, rank, function, *arguments):
    store.call(rank, function, arguments, None)
    absent.made(rank, function, arguments[0])


def test_what_comes_before_the_sandbox_s_first_change_is_there_at_once_and_so_are_counts():
    store = KeyValue()
    AbsentChanges(log(), [0, 2], store)
    assert store.values == {"early": b"x", "sum": b"2"}


def test_the_sandbox_s_last_arrival_sees_the_whole_count_whoever_it_is():
    """Recorded: 1, 0, 3, 2. The rank that comes last is the one that tells the others."""
    rows = [(rank, "add", "arrived", b"1") for rank in (1, 0, 3, 2)] + [(2, "set", "all", b"here")]
    for first, second in ((1, 2), (2, 1)):
        store = KeyValue()
        absent = AbsentChanges(log(rows), [1, 2], store)
        counts = []
        for rank in (first, second):
            counts.append(store.call(rank, "add", ("arrived", 1), None)[1])
            absent.made(rank, "add", "arrived")
        assert counts == [3, 4]


def test_what_came_later_waits_for_the_sandbox():
    store = KeyValue()
    absent = AbsentChanges(log(), [0, 2], store)
    sandbox_calls(store, absent, 2, "add", "sum", 4)  # sooner than in the recording: rank 0 is late
    assert store.values == {"early": b"x", "sum": b"6"}
    sandbox_calls(store, absent, 0, "add", "sum", 1)
    # Rank 3 did not yet know in the recording that both had added; a key that it removed may still be wanted.
    assert store.values == {"early": b"x", "sum": b"7", "all": b"here"}
    assert "last" not in store.values  # the sandbox's own to set


def test_changes_that_were_not_recorded_do_not_matter():
    store = KeyValue()
    absent = AbsentChanges(log(), [0], store)
    sandbox_calls(store, absent, 0, "set", "0/gloo/address", b"z")
    assert "all" not in store.values
    sandbox_calls(store, absent, 0, "add", "sum", 1)
    assert store.values["all"] == b"here" and store.values["sum"] == b"7"


def test_everything():
    store = KeyValue()
    absent = AbsentChanges(log(), [0], store)
    absent.apply(everything=True)
    assert store.values == {"early": b"x", "sum": b"6", "all": b"here"}
