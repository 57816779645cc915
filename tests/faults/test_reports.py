"""What prism-record says of programs that cannot go on: the exact lines, for each kind of mistake."""

import re

import pytest

START = """import os, socket, subprocess, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
dist.all_reduce(t)
"""  # six lines


def report(bench, world, text, jobs=2, expect=1):
    """The lines on stderr of a program that goes on like this, without the times."""
    (bench.out / "job.py").write_text(START + text)
    done = bench.run("record", "-n", world, "-j", jobs, "-o", "run.h5", "--", "job.py", expect=expect)
    assert expect == 0 or done.stderr.endswith("partial graph kept in run.h5 (incomplete)\n")
    return [re.sub(r" +", " ", re.sub(r" \d+\.\d s ", " T ", line)).strip() for line in done.stderr.splitlines()]


def deadlock(*rows):
    return [
        "prism-record: deadlock: no rank can run",
        "rank waits in group op# since for ranks at",
        *rows,
        "partial graph kept in run.h5 (incomplete)",
    ]


def test_a_call_that_one_rank_leaves_out(bench):
    """Sizes agree, so nobody notices until the end; the call that is missing is long past by then."""
    body = (
        "def step(k):\n    dist.all_reduce(t)\n    if not (k == 2 and rank == 3):\n        dist.all_reduce(t)\n"
        "    dist.all_reduce(t)\nfor k in range(4):\n    step(k)\n"
    )
    assert report(bench, 4, body) == deadlock(
        "0-2 all_reduce 16 B float32 world [0,1,2,3] 12 T 3 job.py:11 step",
        "3 - - - - - program ended",
        "rank 3 skipped operation 8 of group world [0,1,2,3], all_reduce (job.py:10 step), which ranks 0-2 called",
    )


def test_a_call_that_only_one_rank_makes(bench):
    body = "for k in range(3):\n    dist.all_reduce(t)\n    if k == 1 and rank == 0:\n        dist.all_reduce(t)\n"
    assert report(bench, 3, body) == deadlock(
        "0 all_reduce 16 B float32 world [0,1,2] 4 T 1-2 job.py:8 <module>",
        "1-2 - - - - - program ended",
        "rank 0 called all_reduce (job.py:10 <module>) as operation 3 of group world [0,1,2], which ranks 1-2 did not",
    )


def test_a_mismatch_after_a_call_left_out(bench):
    """The report of the mismatch names the mistake, not only where it came out."""
    body = (
        "for k in range(2):\n    dist.all_reduce(t)\n    if k or rank != 1:\n        dist.all_reduce(t)\n"
        "    dist.all_reduce(t)\ndist.barrier()\n"
    )
    first, cause, _ = report(bench, 2, body, jobs=1)
    assert first in (
        "prism-record: mismatched collective: operation 6 of group world [0,1]: rank 0 calls all_reduce 16 B float32 "
        "(job.py:11 <module>), rank 1 called barrier 0 B (job.py:12 <module>)",
        "prism-record: mismatched collective: operation 6 of group world [0,1]: rank 1 calls barrier 0 B "
        "(job.py:12 <module>), rank 0 called all_reduce 16 B float32 (job.py:11 <module>)",
    )
    assert (
        cause == "rank 1 skipped operation 2 of group world [0,1], all_reduce (job.py:10 <module>), which rank 0 called"
    )


def test_other_roots(bench):
    first, agreed, _ = report(bench, 2, "dist.broadcast(t, rank)\n", jobs=1)
    assert re.fullmatch(
        r"prism-record: mismatched collective: operation 1 of group world \[0,1\]: rank (\d) calls broadcast 16 B float32 "
        r"from root \1 \(job.py:7 <module>\), rank (\d) called broadcast 16 B float32 from root \2 \(job.py:7 <module>\)",
        first,
    )
    assert agreed == "they agreed until operation 0, all_reduce (job.py:6 <module>)"


def test_asynchronous_operations_have_their_own_numbers(bench):
    """Rank 0 waits for the second of three; the table does not name the last."""
    body = "if rank == 0:\n    w = [dist.all_reduce(t, async_op=True) for _ in range(3)]\n    w[1].wait()\n"
    assert report(bench, 2, body + "else:\n    dist.all_reduce(t)\n") == deadlock(
        "0 all_reduce 16 B float32 world [0,1] 2 T 1 job.py:8 <listcomp>",
        "1 - - - - - program ended",
        "rank 1 has ended; rank 0 still waits in all_reduce 16 B float32 (job.py:8 <listcomp>)",
    )


def test_receives_first(bench):
    assert report(bench, 2, "dist.recv(t, 1 - rank)\ndist.send(t, 1 - rank)\n") == deadlock(
        "0 recv 16 B float32 world [0,1] - T 1 job.py:7 <module>",
        "1 recv 16 B float32 world [0,1] - T 0 job.py:7 <module>",
        "rank 0 waits for rank 1 to send in world [0,1] at job.py:7 <module>; rank 1 waits for rank 0 to send in "
        "world [0,1] at job.py:7 <module>: each receives before it sends",
    )


def test_many_ranks_that_wait_in_a_ring_are_one_line(bench):
    *rows, cause, kept = report(bench, 16, "dist.recv(t, (rank - 1) % world)\n")
    group = "world [0,1,2,3,4,5,6,7,…]"
    assert [*rows, kept] == deadlock(f"0-15 recv 16 B float32 {group} - T 0-15 job.py:7 <module>")
    assert cause.endswith("; … and so on, 16 ranks in a ring: each receives before it sends")


def test_another_tag(bench):
    body = "dist.send(t, 1, tag=5) if rank == 0 else dist.recv(t, 0, tag=3)\n"
    assert report(bench, 2, body) == deadlock(
        "1 recv 16 B float32 tag 3 world [0,1] - T 0 job.py:7 <module>",
        "0 - - - - - program ended",
        "rank 1 waits for tag 3 of rank 0, which sent tag 5 at job.py:7 <module>",
    )


def test_a_receive_from_anybody(bench):
    assert report(bench, 3, "dist.recv(t) if rank == 0 else None\n") == deadlock(
        "0 recv 16 B float32 world [0,1,2] - T any job.py:7 <module>",
        "1-2 - - - - - program ended",
        "ranks 1-2 have ended; rank 0 still waits in recv 16 B float32 (job.py:7 <module>)",
    )


def test_a_rank_that_polls_when_another_fails(bench):
    """It is told to give up between a question and its answer, and says nothing of its own."""
    body = (
        "store = dist.distributed_c10d._get_default_store()\n"
        "while rank == 0 and not store.check(['go']):\n    pass\nraise ValueError('wrong')\n"
    )
    lines = report(bench, 2, body)
    assert lines[-3:-1] == [
        "ValueError: wrong",
        "prism-record: rank 1 ended with exit status 1 after job.py:6 <module>",
    ]
    assert [line for line in lines if line.startswith(("Traceback", "File"))] == [
        "Traceback (most recent call last):",
        'File "job.py", line 10, in <module>',
    ]


ASLEEP = """
if rank == 1:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
elif rank == 2:
    subprocess.run(["cat"], stdin=os.pipe()[0])
elif rank == 3:
    pair = socket.socketpair()
    pair[0].recv(1)
elif rank == 4:
    ends = os.pipe()
    os.read(ends[0], 1)
elif rank == 6:
    os.kill(os.getpid(), 19)
elif rank == 7:
    thread = threading.Thread(target=lambda: dist.recv(t, 0))
    thread.start()
    thread.join()
dist.all_reduce(t)
"""


def test_ranks_that_are_stuck_outside_communication(bench):
    """One turn for all: a sleeper gives it to the others. They are named first, and at the end, if nothing else can go on."""
    lines = report(bench, 8, ASLEEP, jobs=1)
    places = {1: "a lock (futex)", 2: "a subprocess (wait4)", 3: "a socket (recvfrom)", 4: "a pipe (read)"}
    places[6] = "a stop (SIGSTOP or the like)"
    assert sorted(lines[:5]) == [
        f"prism-record: warning: rank {rank} outside communication in {what}, after job.py:6 <module>; "
        "other ranks run meanwhile"
        for rank, what in places.items()
    ]
    assert lines[5:] == deadlock(
        "0,5 all_reduce 16 B float32 world [0,1,2,3,4,5,6,7] 1 T 1-4,6-7 job.py:26 <module>",
        *(f"{rank} {what} - - T - after job.py:6 <module>" for rank, what in places.items()),
        "7 recv 16 B float32 world [0,1,2,3,4,5,6,7] - T 0 job.py:23 <lambda>",
        "ranks 1-4,6 are outside communication, in a lock (futex) (rank 1); ranks 0,5 wait for them",
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(9) if rank == 0 else None\ndist.all_reduce(t)\n", "a sleep (clock_nanosleep)"),
        (
            "while rank == 0 and not os.path.exists('made'):\n    time.sleep(0.05)\nopen('made', 'w').close()\n"
            "dist.all_reduce(t)\n",
            "",
        ),
        (
            "work = 'import time\\nend = time.time() + 24\\nwhile time.time() < end: pass'\n"
            "if rank == 0:\n    subprocess.run([sys.executable, '-c', work], start_new_session=True)\ndist.all_reduce(t)\n",
            "",
        ),
        ("end = time.time() + 7\nwhile rank == 0 and time.time() < end:\n    pass\ndist.all_reduce(t)\n", ""),
    ],
    ids=["sleeps", "polls for what another rank makes", "waits for a subprocess that computes", "computes"],
)
def test_what_will_go_on_is_no_deadlock(body, said, bench):
    """With one turn at a time: a rank that sleeps is named, and all end well."""
    lines = report(bench, 2, body, jobs=1, expect=0)
    warning = (
        "prism-record: warning: rank 0 outside communication in {}, after job.py:6 <module>; other ranks run meanwhile"
    )
    assert lines == ([warning.format(said)] if said else [])
