"""In a replay the sandbox ranks compute what they compute among real peers, bit for bit."""

import subprocess

import pytest

from prism_tools.graph import file
from tests.tools import LIMIT, command, environment, left_in, said

CASES = {
    "W4": (4, ["--pp", "2"], "2-3"),
    "W8": (8, ["--tp", "2", "--pp", "2"], "4-5"),
    "W8-experts": (8, ["--tp", "2", "--pp", "2", "--ep", "2", "--moe", "4"], "5,6"),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_of_gpt(case, real, stages):
    """Ranks of the last stage: what crosses the sandbox's edge meets in sums of two addends, and point to point."""
    world, arguments, ranks = CASES[case]
    chosen = {int(rank) for rank in ranks.replace("-", ",").split(",")}
    expected = said(real.output("gpt.py", *arguments, world=world), "loss", chosen)
    assert len(expected) == 4 * len(chosen)
    calibrated = stages.calibrated(stages.sliced(stages.recorded("gpt.py", *arguments, world=world)))
    replayed = stages.replayed(calibrated, ranks)
    assert replayed.lines("loss") == expected
    assert replayed.stderr == ""
    graph = file.read(replayed.path)
    assert graph.stage == "replayed" and sorted(graph.replay.timing.rank.tolist()) == sorted(chosen)


def test_every_operation(real, stages):
    """Groups inside the sandbox (0-1) are real, the others mixed; sums are exact in any order (see collectives.py)."""
    expected = said(real.output("collectives.py", world=4), "check", {0, 1})
    calibrated = stages.calibrated(stages.sliced(stages.recorded("collectives.py", world=4), "--no-probe"))
    assert stages.replayed(calibrated, "0-1").lines("check") == expected


@pytest.mark.parametrize(
    ("name", "ranks", "word"), [("moe.py", "1,2", "loss"), ("store.py", "0,3", "check"), ("store.py", "1,2", "check")]
)
def test_programs(name, ranks, word, real, stages):
    """Value-dependent splits, any-source receives and a batched ring; the rendezvous store of absent ranks."""
    chosen = {int(rank) for rank in ranks.split(",")}
    expected = said(real.output(name, world=4), word, chosen)
    calibrated = stages.calibrated(stages.sliced(stages.recorded(name, world=4), "--no-probe"))
    assert expected and stages.replayed(calibrated, ranks).lines(word) == expected


def test_gloo_s_order_is_kept(real, stages):
    """Sums of four across the sandbox's edge have gloo's bits in a slice and in a replay, where the recording added so."""
    expected = said(real.output("ddp.py", world=4), "loss")
    bare = stages.recorded("ddp.py", world=4, options=("--reduce-order", "ring"))
    assert bare.lines("loss") == expected
    sliced = stages.sliced(bare, "--no-probe", "-v")
    assert sliced.lines("loss") == expected
    replayed = stages.replayed(stages.calibrated(sliced), "1-2")
    assert replayed.lines("loss") == [line for line in expected if line.split()[2] in ("1", "2")]


def test_the_whole_pipeline_in_one_pipe(stages, tmp_path):
    """Graphs go from tool to tool through pipes, the programs' own output does not get into them."""
    bare = stages.recorded("gpt.py", "--pp", "2", world=4)
    tools = [("slice", bare.path, "-s", 2), ("calibrate",), ("replay", "-r", "0-1"), ("inspect", "summary")]
    line = " | ".join(" ".join(command(*tool)) for tool in tools)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=tmp_path,
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    said_by_ranks = [text for text in done.stderr.splitlines() if not text.startswith("time rank ")]
    assert said_by_ranks == []
    report = done.stdout.splitlines()
    assert report[0].startswith("world 4 (PP 2 · DP 2 · TP 1)   program ")
    assert report[0].endswith("backend gloo   iterations 4")
    labels = [text[:20].strip() for text in report[1:]]
    shown = ["iteration time", "critical path", "peak memory", "slowest member", "groups"]
    assert [label for label in labels if label in shown] == shown
    assert "solved" in report[1] and any(
        "replayed" in text and "3 iterations" in text or "valid" in text for text in report
    )
    assert any("where durations come from" in text and "emulated 0 %" in text for text in report)
    assert any("6 created of 9   virtual ranks touched 2 of 2" in text for text in report)
    assert all(len(text) <= 100 for text in report)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("ranks", ["0-1", "3"])
def test_a_cut_holds_all_that_its_ranks_need(ranks, real, stages, bench):
    """The same bits as among real peers and with all payloads; other ranks are refused with what to do."""
    chosen = {int(rank) for rank in ranks.split("-")}
    expected = said(real.output("large.py", world=4), "check", chosen)
    replayed, sizes = [], []
    for tensors in ("all", f"cut={ranks}"):
        bare = stages.recorded("large.py", world=4, options=("--tensors", tensors))
        calibrated = stages.calibrated(stages.sliced(bare, "--no-probe"))
        replayed.append(stages.replayed(calibrated, ranks))
        payload = file.read(bare.path).payload
        sizes.append(payload.bytes)
        assert payload.mode == tensors and payload.path == f"{bare.path.stem}.payload"
    assert len(expected) == 14 * len(chosen)
    assert [(made.lines("check"), made.stderr) for made in replayed] == [(expected, "")] * 2
    assert sizes[1] < 0.75 * sizes[0]
    done = bench.run("replay", "-r", 2, calibrated.path, "-o", "x.h5", expect=1)
    remedy = "replay exactly these, or record again with --tensors cut=2"
    assert done.stderr == f"prism-replay: {calibrated.path}: payloads were kept for ranks {ranks} only; {remedy}\n"
    assert bench.files() == set()


def test_without_payloads_the_tools_say_so(bench):
    """Timing still stands; what absent ranks contributed to large sums is not known, small payloads are always kept."""
    bench.run("record", "-n", 4, "--tensors", "none", "-o", "bare.h5", "--", program_of_sums(bench.out))
    graph = file.read(bench.out / "bare.h5")
    assert (graph.payload.mode, graph.payload.bytes) == ("none", 24 + 8)
    done = bench.run("slice", "bare.h5", "-s", 2, "--no-probe", "-o", "sliced.h5")
    lost = "contributions were not recorded"
    assert done.stderr == f"prism-slice: warning: 10 {lost}: what depends on their values may differ\n"
    bench.run("calibrate", "sliced.h5", "-o", "calibrated.h5")
    done = bench.run("replay", "-r", "0-1", "calibrated.h5", "-o", "replayed.h5")
    assert done.stderr == f"prism-replay: warning: 6 {lost}: losses are not comparable\n"


def program_of_sums(folder):
    """Ranks 2 and 3 contribute to a sum of ranks 0 and 1 and send one message: six contributions, as 0 and 1 see them."""
    path = folder / "sums.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.broadcast(torch.tensor([7]), 0)\n"
        "dist.all_reduce(torch.ones(20_000))\n"
        "if dist.get_rank() > 1:\n"
        "    dist.send(torch.ones(20_000), dist.get_rank() - 2)\n"
        "else:\n"
        "    dist.recv(torch.ones(20_000), dist.get_rank() + 2)\n"
    )
    return path
