"""The rendezvous store's state: as torch's own stores behave, with a log of what changed."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from prism_tools.capture.kv import KeyValue


def ask(store, function, *arguments, rank=0, token=None):
    known, answer = store.call(rank, function, arguments, token)
    assert known
    return answer


def test_set_and_get():
    store = KeyValue()
    assert ask(store, "set", "a", b"1") is None
    assert ask(store, "get", "a") == b"1"
    assert ask(store, "num_keys") == 1
    assert ask(store, "check", ["a"]) is True and ask(store, "check", ["a", "b"]) is False
    assert ask(store, "delete_key", "a") is True and ask(store, "delete_key", "a") is False
    assert ask(store, "num_keys") == 0


def test_add_counts_in_text():
    store = KeyValue()
    assert [ask(store, "add", "n", amount) for amount in (3, 0, -5)] == [3, 3, -2]
    assert ask(store, "get", "n") == b"-2"


def test_append():
    store = KeyValue()
    ask(store, "append", "a", b"x")
    ask(store, "append", "a", b"yz")
    assert ask(store, "get", "a") == b"xyz"


def test_waiters_are_released_once_all_their_keys_exist():
    store = KeyValue()
    assert store.call(0, "get", ("a",), "getter") == (False, None)
    assert store.call(1, "wait", (["a", "b"],), "waiter") == (False, None)
    assert store.released() == []
    ask(store, "set", "a", b"1")
    assert store.released() == [("getter", b"1")]
    ask(store, "add", "b", 1)
    assert store.released() == [("waiter", True)]
    assert store.released() == [] and store.waiting == {}
    assert ask(store, "wait", ["a", "b"]) is True


def test_the_log_holds_changes_and_gives_the_same_state():
    store = KeyValue()
    ask(store, "set", "a", b"1", rank=3)
    ask(store, "add", "n", 5, rank=1)
    ask(store, "add", "n", -2, rank=2)
    ask(store, "append", "a", b"2", rank=0)
    ask(store, "compare_set", "c", b"", b"first", rank=0)
    ask(store, "get", "a", rank=0)
    ask(store, "check", ["a"], rank=0)
    ask(store, "set", "gone", b"", rank=0)
    ask(store, "delete_key", "gone", rank=0)
    assert store.log == [
        (3, "set", "a", b"1"),
        (1, "add", "n", b"5"),
        (2, "add", "n", b"-2"),
        (0, "append", "a", b"2"),
        (0, "compare_set", "c", b"first"),
        (0, "set", "gone", b""),
        (0, "delete_key", "gone", b""),
    ]
    again = KeyValue()
    for _, function, key, value in store.log:
        again.apply(function, key, value)
    assert again.values == store.values == {"a": b"12", "n": b"3", "c": b"first"}


def test_a_compare_that_fails_changes_nothing_on_replay_either():
    store = KeyValue()
    ask(store, "set", "a", b"1")
    assert ask(store, "compare_set", "a", b"other", b"2") == b"1"
    again = KeyValue()
    for _, function, key, value in store.log:
        again.apply(function, key, value)
    assert again.values == store.values == {"a": b"1"}


SCRIPT = [
    ("compare_set", "new", "", "first"),
    ("compare_set", "new", "", "again"),
    ("compare_set", "new", "first", "second"),
    ("compare_set", "absent", "expected", "desired"),
    ("check", ["absent"]),
    ("set", "n", "4"),
    ("add", "n", 3),
    ("get", "n"),
    ("delete_key", "new"),
    ("delete_key", "new"),
    ("queue_push", "q", "one"),
    ("queue_push", "q", "two"),
    ("queue_len", "q"),
    ("check", ["q"]),
    ("queue_pop", "q", True),
    ("queue_pop", "q", False),
    ("queue_len", "q"),
    ("check", ["q"]),
    ("list_keys",),
]


@pytest.mark.parametrize(
    "make", [dist.HashStore, lambda: dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20))]
)
def test_answers_are_those_of_torch(make):
    torch_store, store = make(), KeyValue()
    for function, *arguments in SCRIPT:
        coded = [a.encode() if isinstance(a, str) and k else a for k, a in enumerate(arguments)]
        expected = getattr(torch_store, function)(*arguments)
        assert ask(store, function, *coded) == expected, (function, arguments)


def test_a_queue_gives_each_element_to_one_waiter():
    store = KeyValue()
    assert store.call(0, "queue_pop", ("q", False), "impatient") == (True, None)
    for rank in (1, 2):
        assert store.call(rank, "queue_pop", ("q", True), f"rank {rank}") == (False, None)
    ask(store, "queue_push", "q", b"a", rank=3)
    assert store.released() == [("rank 1", b"a")] and list(store.waiting) == ["rank 2"]
    ask(store, "queue_push", "q", b"b", rank=3)
    assert store.released() == [("rank 2", b"b")]
    assert store.log[1:3] == [(1, "queue_pop", "q", b""), (3, "queue_push", "q", b"b")]


def test_a_wait_that_expires_is_in_the_log():
    store = KeyValue()
    assert store.call(2, "wait", (["a", "b"], 10**9), "token") == (False, None)
    assert store.waiting["token"].deadline > 10**9
    store.expire("token")
    assert store.waiting == {} and store.log == [(2, "expired", "a", b"")]


def test_a_queue_and_a_value_of_one_name_are_two_things():
    store = KeyValue()
    ask(store, "queue_push", "q", b"1")
    ask(store, "set", "v", b"2")
    assert store.call(0, "get", ("q",), "getter") == (False, None)
    assert store.call(0, "queue_pop", ("v", True), "popper") == (False, None)
    assert ask(store, "queue_pop", "v", False) is None
    ask(store, "set", "q", b"3")
    ask(store, "queue_push", "v", b"4")
    assert store.released() == [("getter", b"3"), ("popper", b"4")]


def test_questions_are_not_logged():
    store = KeyValue()
    for amount in (0, 0, 2, 0):
        ask(store, "add", "n", amount)
    assert ask(store, "compare_set", "n", b"7", b"8") == b"2"
    assert store.log == [(0, "add", "n", b"0"), (0, "add", "n", b"2")]
