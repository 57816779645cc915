"""Ranks that ask for the same again and again let the others run, and are named if nobody else can."""

import time

import pytest

from prism_tools.errors import PrismError
from prism_tools.graph import file
from prism_tools.graph.schema import Op
from prism_tools.record.polls import PATIENCE, Polls
from prism_tools.record.stalls import NOTICE
from tests.record.test_sends import HEAD, Line

SPINS = """
from datetime import timedelta
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set('flag', 'no')
dist.barrier()
if rank == 0:
    while store.add('count', 0) < 2: pass
    while store.get('flag') != b'yes': pass
    while store.compare_set('turn', '1', '2') != b'2': pass
    work = dist.irecv(other, 1)
    while not work.is_completed(): store.check(['go'])
    while not store.check(['late']): pass
else:
    store.add('count', 2)
    store.set('flag', 'yes')
    store.set('turn', '1')
    dist.send(mine, 0)
    try:
        store.wait(['never'], timedelta(seconds=1))
    except dist.DistStoreError:
        store.set('late', 'at last')
dist.barrier()
"""


def test_one_turn_for_all(bench):
    """Rank 1 runs although rank 0 never waits, its time limit ends, and the log holds changes, not questions."""
    (bench.out / "spins.py").write_text(HEAD + SPINS)
    done = bench.run("record", "-n", 2, "-j", 1, "-o", "run.h5", "--", "spins.py")
    assert done.stderr == ""
    log = file.read(bench.out / "run.h5").store
    found = [
        (rank, op, key.rsplit("/", 1)[-1]) for rank, op, key in zip(log.rank.tolist(), log.op, log.key, strict=True)
    ]
    assert found.count((0, "add", "count")) <= 1 and found.count((0, "compare_set", "turn")) == 1
    assert found[-2:] == [(1, "expired", "never"), (1, "set", "late")]


def test_what_is_asked_in_vain():
    polls = Polls()
    assert [polls.in_vain(("check", "a"), False) for _ in range(2)] == [False, True]
    assert polls.in_vain(("check", "b"), False) is False and polls.since == 0.0  # not asked before
    assert polls.in_vain(("check", "a"), False) and polls.in_vain(("check", "b"), False) and polls.since > 0
    assert polls.in_vain(("check", "a"), True) is False and polls.since == 0.0
    assert polls.in_vain(("check", "a"), True)
    polls.news()
    assert polls.in_vain(("check", "a"), True) is False


@pytest.fixture
def polling(tmp_path):
    """Rank 0 polls a receive from rank 1, which waits for rank 0."""
    line = Line(tmp_path, "gloo", eager=True)
    line.call(0, 1, Op.RECV, 0)
    line.call(1, 1, Op.RECV, 0)
    line.tell(1, ("wait", 1))
    for _ in range(2):
        line.tell(0, ("test", 1))
    yield line
    line.coordinator.payloads.discard()
    line.close()


def test_nobody_else_can_run(polling):
    coordinator = polling.coordinator
    coordinator._look_for_polls()
    assert coordinator.notices == []
    coordinator._alone = coordinator.turns[0].polls.begun = time.monotonic() - NOTICE - 1
    for _ in range(2):
        coordinator._look_for_polls()
    place = "recv 4 B float32 (train.py:1 step)"
    assert coordinator.notices == [
        f"no rank can run but 0, polling {place}; given up {PATIENCE:.0f} s after the first time"
    ]
    coordinator._alone = coordinator.turns[0].polls.begun = time.monotonic() - PATIENCE - 1
    with pytest.raises(PrismError, match="deadlock: no rank can run") as caught:
        coordinator._look_for_polls()
    assert caught.value.detail.splitlines()[-1].endswith(": each receives before it sends")


def test_a_rank_that_asked_some_time_ago_does_something_else(polling):
    polls = polling.coordinator.turns[0].polls
    polls.begun = polls._last = time.monotonic() - PATIENCE - 1
    polling.coordinator._look_for_polls()
    assert polls.since == 0.0 and polling.coordinator.notices == []
    polls.in_vain(("test", 1), None)
    assert time.monotonic() - polls.since < PATIENCE


def test_another_rank_computes(polling):
    """However long it takes, the one that polls is not given up."""
    coordinator = polling.coordinator
    polling.call(0, 2, Op.SEND, 0, 1.0)
    coordinator.turns[0].polls.begun = time.monotonic() - 2 * PATIENCE
    coordinator._look_for_polls()
    assert coordinator.notices == []
