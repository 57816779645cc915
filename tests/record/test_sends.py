"""--sends: what ends when, which deadlocks show, and which send belongs to which receive on gloo and on NCCL."""

import re
import socket

import numpy as np
import pytest

from prism_tools.capture import wire
from prism_tools.capture.server import Rank
from prism_tools.graph.schema import Op, Reduce
from prism_tools.record.coordinator import Coordinator, State, Turn
from prism_tools.tensors.payload import PayloadWriter
from tests.tools import program, said

HEAD = """
import torch, torch.distributed as dist
dist.init_process_group('gloo')
rank, world = dist.get_rank(), dist.get_world_size()
def say(*what):
    print(' '.join(map(str, ('check rank', rank, *what, '\\n'))), end='', flush=True)
mine, other = torch.full((3,), float(rank)), torch.empty(3)
right, left = (rank + 1) % world, (rank - 1) % world
"""
SEND_FIRST = """
dist.send(mine, right)
dist.recv(other, left)
say(other.tolist())
"""
POSTED = """
work = dist.isend(mine, right)
dist.recv(other, left)
work.wait()
say(other.tolist())
"""
BATCH = """
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, other, left)]):
    work.wait()
say(other.tolist())
"""
CROSSED = """
if rank == 0:
    {0}(torch.ones(2), 1, tag=1){1}
    {0}(torch.zeros(2), 1, tag=2){1}
else:
    for tag in 2, 1:
        dist.recv(other[:2], 0, tag=tag)
        say(tag, other[:2].tolist())
"""
LATE = """
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    work = dist.isend(mine, 1)
    say(work.is_completed())
    store.set('go', 'on')
    work.wait()
    say(work.is_completed())
else:
    store.wait(['go'])
    dist.recv(other, 0)
"""
WAYS = ("eager", "rendezvous")


def record(bench, text, sends, world=2, expect=0):
    (bench.out / "sends.py").write_text(HEAD + text)
    return bench.run("record", "-n", world, "-j", 2, "--sends", sends, "-o", "run.h5", "--", "sends.py", expect=expect)


def table_of(done):
    """The rows of a deadlock's table as lists of cells, and the sentence below it."""
    first, _, *rows, suspicion, _ = done.stderr.splitlines()
    assert first == "prism-record: deadlock: no rank can run"
    return [re.split(r"  +", row.strip()) for row in rows], suspicion


def test_everybody_sends_first(bench):
    assert len(record(bench, SEND_FIRST, "eager", world=3).lines("check")) == 3
    rows, suspicion = table_of(record(bench, SEND_FIRST, "rendezvous", world=3, expect=1))
    assert [(row[0], row[1], row[5]) for row in rows] == [
        (str(r), "send 12 B float32", str((r + 1) % 3)) for r in range(3)
    ]
    assert all(row[6] == "sends.py:10 <module>" for row in rows)
    assert suspicion == (
        "; ".join(
            f"rank {r} waits for rank {(r + 1) % 3} to receive in world [0,1,2] at sends.py:10 <module>"
            for r in range(3)
        )
        + ": each sends before it receives"
    )


@pytest.mark.parametrize("sends", WAYS)
def test_what_is_posted_at_once_goes_on_together(sends, bench):
    """An isend beside a receive, then a batch."""
    done = record(bench, POSTED + BATCH, sends, world=3)
    assert done.lines("check") == [f"check rank {r} {[float((r - 1) % 3)] * 3} " for r in range(3) for _ in range(2)]


def test_a_send_ends_when_its_receive_is_posted(bench):
    assert record(bench, LATE, "eager").lines("check") == ["check rank 0 True "] * 2
    assert record(bench, LATE, "rendezvous").lines("check") == ["check rank 0 False ", "check rank 0 True "]


def test_a_receiver_that_has_ended(bench):
    text = "if rank == 0: dist.send(mine, 1)\n"
    record(bench, text, "eager")
    rows, suspicion = table_of(record(bench, text, "rendezvous", expect=1))
    assert rows[0][:2] == ["0", "send 12 B float32"] and rows[1][0] == "1" and rows[1][-1] == "program ended"
    assert suspicion == "rank 1 has ended; rank 0 still waits in send 12 B float32 (sends.py:9 <module>)"


@pytest.mark.parametrize(("sends", "call"), [("eager", ("dist.send", "")), ("rendezvous", ("_ = dist.isend", ""))])
def test_gloo_matches_by_tag(sends, call, bench):
    done = record(bench, CROSSED.format(*call), sends)
    assert done.lines("check") == ["check rank 1 1 [1.0, 1.0] ", "check rank 1 2 [0.0, 0.0] "]


def test_crossed_tags_in_the_table(bench):
    rows, suspicion = table_of(record(bench, CROSSED.format("dist.send", ""), "rendezvous", expect=1))
    assert [row[:2] + [row[5]] for row in rows] == [
        ["0", "send 8 B float32 tag 1", "1"],
        ["1", "recv 8 B float32 tag 2", "0"],
    ]
    assert suspicion == "rank 1 waits for tag 2 of rank 0, which sent tag 1 at sends.py:11 <module>"


@pytest.mark.parametrize(("name", "word"), [("pipeline.py", "loss"), ("moe.py", "check"), ("collectives.py", "check")])
def test_real_programs_compute_the_same(name, word, real, stages):
    """Real gloo's sends are rendezvous: what runs there runs here."""
    made = stages.recorded(name, world=4, options=("--sends", "rendezvous"))
    assert made.lines(word) == said(real.output(name, world=4), word) != []


class Line:
    """A coordinator with ranks that only talk: the messages that a rank's process would send, and what is answered."""

    def __init__(self, folder, backend, eager):
        self.coordinator = Coordinator(2, PayloadWriter(str(folder / "x.payload"), 0))
        self.ends = []
        for number in (0, 1):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.ends.append(theirs)
            rank = self.coordinator.ranks[number] = Rank(number, 0, wire.Peer(ours, self.coordinator.full))
            rank.gone = True  # no process to end
            self.coordinator.turns[number] = Turn(rank, eager, State.ACTIVE)
            self.tell(number, ("group", 0, "0", "default_pg", backend, (0, 1)))
            self.tell(number, ("site", 0, "train.py:1 step"))

    def tell(self, number, message, payload=b""):
        rank = self.coordinator.ranks[number]
        self.coordinator.handle(rank, rank.main, message, memoryview(bytearray(payload)), [])

    def call(self, number, opid, op, tag, value=None):
        """A send of one float (``value``) to the other rank, or a receive from it."""
        descs, payload = [("float32", 1)], b"" if value is None else np.float32(value).tobytes()
        head = ("op", opid, opid, 0, int(op), int(Reduce.NONE), -1, 1 - number, tag)
        self.tell(number, (*head, descs, len(payload) // 4, 0, 0, False, 1.0, False), payload)

    def done(self, number):
        """What has ended and was not asked for: operation → value received, None for a send."""
        found = {}
        for opid, (_, parcel) in self.coordinator.turns[number].done.items():
            found[opid] = float(np.frombuffer(parcel.inline, np.float32)[0]) if parcel.size else None
        return found

    def close(self):
        self.coordinator.close()
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("backend", "received"), [("gloo", {1: 20.0, 2: 10.0}), ("nccl", {1: 10.0, 2: 20.0})])
@pytest.mark.parametrize("receiver_first", [True, False])
def test_nccl_has_no_tags(backend, received, eager, receiver_first, tmp_path):
    """Two sends with tags 1 and 2, received with tags 2 and 1: by tag on gloo, in order on NCCL."""
    line = Line(tmp_path, backend, eager)
    sends = [(0, 1, Op.SEND, 1, 10.0), (0, 2, Op.SEND, 2, 20.0)]
    receives = [(1, 1, Op.RECV, 2), (1, 2, Op.RECV, 1)]
    for call in [*receives, *sends] if receiver_first else [*sends, *receives]:
        line.call(*call)
    assert line.done(1) == received
    assert line.done(0) == ({} if eager else {1: None, 2: None})
    line.close()


def test_nccl_s_pairs_have_queues_of_their_own(tmp_path):
    """What goes one way does not wait for what goes the other way, and a send waits for its own receive."""
    line = Line(tmp_path, "nccl", eager=False)
    line.call(0, 1, Op.SEND, 5, 1.0)
    line.call(1, 1, Op.SEND, 6, 2.0)
    assert line.done(0) == line.done(1) == {}
    line.call(0, 2, Op.RECV, 7)
    assert (line.done(0), line.done(1)) == ({2: 2.0}, {1: None})
    line.call(1, 2, Op.RECV, 8)
    assert (line.done(0), line.done(1)) == ({1: None, 2: 2.0}, {1: None, 2: 1.0})
    line.close()


def test_usage(bench):
    for option in (["--sends", "rendezvous"], ["--reduce-order", "ring"]):
        done = bench.run("record", "--live", *option, "-o", "run.h5", "--", "torchrun", program("ddp.py"), expect=2)
        assert done.stderr.startswith("prism-record: --live: the real backends add and send; leave ")
