"""Programs that deadlock, disagree, crash or are killed under prism-record: the exit status, and what is said and left."""

import re

import pytest

from prism_tools.graph import file
from tests.tools import program


def lines_of_tool(stderr, tool="prism-record"):
    return [line for line in stderr.splitlines() if line.startswith(f"{tool}: ")]


def test_deadlock(bench):
    done = bench.run("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program("deadlock.py"), expect=1)
    first, header, *rest = done.stderr.splitlines()
    *rows, suspicion, kept = rest
    assert first == "prism-record: deadlock: no rank can run"
    assert header.split() == ["rank", "waits", "in", "group", "op#", "since", "for", "ranks", "at"]
    table = [re.split(r"  +", row.strip()) for row in rows]
    waiting = {ranks: (what, group, missing) for ranks, what, group, _, _, missing, _ in table}
    labels = {group.split(" ")[-1] for _, group, _ in waiting.values()}
    assert labels == {"[0,1,2]", "[0,2,3]"}
    assert {ranks: missing for ranks, (_, _, missing) in waiting.items()} == {"0-1": "2", "2-3": "0"}
    assert {what for what, _, _ in waiting.values()} == {"all_reduce 32 B float32"}
    assert all(re.fullmatch(r"\d+\.\d s", row[4]) for row in table)
    assert all(re.fullmatch(r"deadlock\.py:\d+ <module>", row[6]) for row in table)
    assert suspicion.startswith("rank 0 waits for rank 2 in ") and suspicion.endswith("in different orders")
    assert kept == "partial graph kept in run.h5 (incomplete)"
    assert done.stdout == "" and all(len(line) <= 200 for line in done.stderr.splitlines())
    assert bench.files() == {"run.h5"}
    check_partial(bench, operations=2)


def check_partial(bench, operations):
    """The partial graph is read only where --partial says so, and holds what happened until then."""
    assert "incomplete" in bench.run("inspect", "summary", "--partial", "run.h5").stdout
    calls = [
        ("inspect", "summary", "run.h5"),
        ("calibrate", "run.h5", "-o", "x.h5"),
    ]
    calls.append(("replay", "-r", 0, "run.h5", "-o", "x.h5"))
    for call, done in zip(calls, bench.run_all(*calls, expect=1), strict=True):
        assert done.stderr.startswith(f"prism-{call[0]}: run.h5: is incomplete: ") and done.stderr.count("\n") == 1
        assert done.stdout == ""
    assert bench.files() == {"run.h5"}
    graph = file.read(bench.out / "run.h5", partial=True)
    assert not graph.complete and graph.payload.mode == "none"
    assert [int((graph.program_of(rank).op == 1).sum()) for rank in range(4)] == [operations] * 4


def test_mismatch(bench):
    done = bench.run("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program("mismatch.py"), expect=1)
    first, agreed, kept = done.stderr.splitlines()
    what = {
        "all_reduce": r"all_reduce 16 B float32 \(mismatch\.py:13 <module>\)",
        "barrier": r"barrier 0 B \(mismatch\.py:11 <module>\)",
    }
    found = re.fullmatch(
        r"prism-record: mismatched collective: operation 1 of group world \[0,1,2,3\]: "
        r"rank (\d) calls (.*), ranks? ([\d,-]+) called (.*)",
        first,
    )
    assert found, first
    for ranks, text in (found.group(1, 2), found.group(3, 4)):
        assert re.fullmatch(what["barrier" if ranks == "2" else "all_reduce"], text)
    assert "2" in found.group(1, 3)
    assert agreed == "they agreed until operation 0, all_reduce (mismatch.py:9 <module>)"
    assert kept == "partial graph kept in run.h5 (incomplete)"
    assert bench.files() == {"run.h5"}


def test_crash(bench):
    """The program's own traceback stays as it is; the exit status is the rank's."""
    done = bench.run("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program("crash.py"), expect=1)
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-3] == "ValueError: bad batch at step 1"
    assert "prism_tools" not in done.stderr and "runpy" not in done.stderr
    assert re.fullmatch(r"prism-record: rank 1 ended with exit status 1( after crash\.py:\d+ <module>)?", lines[-2])
    assert lines[-1] == "partial graph kept in run.h5 (incomplete)"
    assert len(lines_of_tool(done.stderr)) == 1
    assert len([line for line in done.stdout.splitlines() if " step 0 " in line]) == 4
    assert bench.files() == {"run.h5"}


def test_exit_status_of_the_program(bench):
    (bench.out / "leave.py").write_text("import sys, os\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    done = bench.run("record", "-n", 2, "-j", 1, "-o", "run.h5", "--", "leave.py", expect=7)
    assert done.stderr.splitlines()[0] == "prism-record: rank 1 ended with exit status 7"


def test_a_rank_that_leaves_without_ending_its_program(bench):
    (bench.out / "leave.py").write_text("import os\nos._exit(0)\n")
    done = bench.run("record", "-n", 1, "-o", "run.h5", "--", "leave.py", expect=1)
    said = "prism-record: rank 0 left without ending its program (os._exit?)"
    assert done.stderr.splitlines() == [said, "partial graph kept in run.h5 (incomplete)"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("-o", "run.h5", "--", "x.py"), "how many ranks? add -n W, or set PRISM_WORLD_SIZE"),
        (("-n", 2, "-o", "run.h5"), "what shall run? add -- program [argument ...]"),
        (("-n", 2, "-o", "-", "--", "x.py"), "-o -: standard output belongs to the program; name a file"),
        (("-n", 0, "-o", "run.h5"), "argument -n/--world-size: '0' is no whole number >= 1; see prism-record --help"),
        (("-n", 2, "--", "x.py"), "-o: name a file for the graph"),
    ],
)
def test_wrong_usage(call, said, bench):
    assert bench.run("record", *call, expect=2).stderr == f"prism-record: {said}\n"
    assert bench.files() == set()


def test_a_killed_rank_and_an_older_recording(bench):
    for name in ("run.h5", "run.payload"):
        (bench.out / name).write_text("old")
    done = bench.run("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program("suicide.py"), expect=137)
    assert done.stderr.splitlines() == [
        "prism-record: rank 1 was killed by SIGKILL",
        "partial graph kept in run.partial.h5 (incomplete)",
    ]
    assert bench.files() == {"run.h5", "run.payload", "run.partial.h5"}
    assert [(bench.out / name).read_text() for name in ("run.h5", "run.payload")] == ["old", "old"]
    assert not file.read(bench.out / "run.partial.h5", partial=True).complete


def test_a_rank_that_ends_while_others_wait(bench):
    (bench.out / "early.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() != 1:\n"
        "    dist.all_reduce(torch.ones(2))\n"
    )
    done = bench.run("record", "-n", 3, "-j", 2, "-o", "run.h5", "--", "early.py", expect=1)
    lines = done.stderr.splitlines()
    assert lines[0] == "prism-record: deadlock: no rank can run"
    assert any(re.match(r"  1 +- .* program ended", line) for line in lines)
    assert any(
        re.match(r"  0,2 +all_reduce 8 B float32 +world \[0,1,2\] .* 1 +early\.py:4 <module>", line) for line in lines
    )
    assert lines[-2] == "rank 1 has ended; ranks 0,2 still wait in all_reduce 8 B float32 (early.py:4 <module>)"


def test_a_key_that_nobody_sets(bench):
    (bench.out / "key.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.distributed_c10d._get_default_store().get('nobody')\n"
    )
    done = bench.run("record", "-n", 2, "-j", 2, "-o", "run.h5", "--", "key.py", expect=1)
    lines = done.stderr.splitlines()
    assert lines[0] == "prism-record: deadlock: no rank can run"
    assert re.match(r"  0-1 +store key '.*nobody' ", lines[2])
    assert re.fullmatch(r"rank 0 waits for store key '.*nobody', which nobody has set", lines[3])


def test_no_such_program(bench):
    done = bench.run("record", "-n", 2, "-o", "run.h5", "--", "nothing.py", expect=127)
    assert done.stderr == "prism-record: nothing.py: no such program; give a Python script, or -m module\n"
    done = bench.run("record", "-n", 2, "-o", "run.h5", "--", "-m", "no.such.module", expect=127)
    assert done.stderr == "prism-record: no module named no.such.module\n"
    assert bench.files() == set()


def test_a_peer_that_does_not_exist(bench):
    """Where real gloo crashes the process, the rank says so."""
    (bench.out / "peer.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for call in (dist.send, dist.recv, dist.isend, dist.irecv, dist.broadcast):\n"
        "    try:\n"
        "        call(torch.ones(1), 2)\n"
        "    except (ValueError, RuntimeError) as error:\n"
        "        sys.stdout.write(f'{error}\\n')\n"  # in one piece: two ranks write to the pipe
    )
    done = bench.run("record", "-n", 2, "-o", "run.h5", "--", "peer.py")
    texts = [f"prism: {name}: no rank 2 in a group of 2" for name in ("send", "recv", "send", "recv")]
    texts.append("ProcessGroupGloo::broadcast: invalid root rank: 2")  # this one it refuses
    assert sorted(done.stdout.splitlines()) == sorted(texts * 2)
