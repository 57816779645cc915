"""With ``prism-record --live`` a program computes what it computes alone, bit for bit, with its real backends."""

import configparser
import subprocess
import sys
from functools import cache

import pytest
import torch

from prism_tools.graph import file
from prism_tools.graph.check import check
from tests.tools import ROOT, command, environment, program

LIMIT = 300  # seconds for one run, far more than any needs
CAPTURED = "stream_captured"  # communication in a CUDA graph: the program goes on, but there is no graph of it
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")


def with_entry_point(folder):
    """PYTHONPATH with these sources, and with the entry point that they declare, whatever is installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    metadata = folder / "prism_tools-0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(f"[torch.backends]{setup['options.entry_points']['torch.backends']}\n")
    return f"{folder}:{ROOT}"


def lines_of(folder, world, options, *before, status=0):
    """Lines of every rank, {rank: [line, …]}, of the suite under torchrun, itself run by the command ``before``, and what
    that said on stderr."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*before, *torchrun, program("live_suite.py"), "--out", str(folder / "lines"), *options],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=with_entry_point(folder)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == status, done.stderr[-5000:]
    return {rank: (folder / f"lines.{rank}").read_text().splitlines() for rank in range(world)}, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Function of (world, *options): lines of the program alone, those of the traced one, and its graph."""

    @cache
    def run(world, *options):
        alone, traced = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("traced")
        graph = traced / "live.h5"
        tool = command("record", "--live", "-q", "-o", graph, "--")
        words = [*options, "--skip", CAPTURED]
        return lines_of(alone, world, words)[0], lines_of(traced, world, words, *tool)[0], graph

    return run


def name_of(line):
    return line.partition(": ")[0]


def differences(expected, traced):
    """Each line that only one of them has: "rank R -line" (expected) or "rank R +line" (traced)."""
    found = []
    for rank, lines in expected.items():
        found += [f"rank {rank} -{line}" for line in lines if line not in traced[rank]]
        found += [f"rank {rank} +{line}" for line in traced[rank] if line not in lines]
    return found


MODES = [
    pytest.param(4, ["--backend", "gloo"], 250, id="gloo"),
    pytest.param(2, ["--backend", "nccl"], 250, id="nccl", marks=needs_two_gpus),
    pytest.param(2, ["--backend", "nccl", "--eager"], 250, id="nccl-eager", marks=needs_two_gpus),
    pytest.param(2, ["--backend", "mixed"], 250, id="mixed", marks=needs_two_gpus),
]


@pytest.mark.parametrize(("world", "options", "least"), MODES)
def test_every_use(world, options, least, runs):
    """``least``: cases, so that a suite that ended early cannot pass."""
    alone, traced, _ = runs(world, *options)
    assert differences(alone, traced) == []
    assert traced == alone
    cases = [name_of(line) for line in alone[0]]
    assert len(cases) == len(set(cases)) >= least and cases[-1] == "end"
    for lines in alone.values():
        assert [name_of(line) for line in lines] == cases
        usual = [line for line in lines if not line.startswith(("type_", "misfit_", "sparse_"))]
        assert sum("Error: " in line for line in usual) < len(usual) / 4  # what a backend refuses


@pytest.mark.parametrize(("world", "options", "least"), MODES)
def test_its_graph(world, options, least, runs):
    """Each case but those that are refused at once left nodes."""
    graph = file.read(runs(world, *options)[2])
    assert check(graph) == []
    assert (graph.stage, len(graph.ranks.program)) == ("sliced", world)
    assert all(program.op.size > 3 * least for program in graph.programs)


@needs_two_gpus
def test_a_cuda_graph_that_communicates_is_refused_and_the_program_goes_on(tmp_path):
    words = ["--backend", "nccl", "--only", CAPTURED]
    folders = [tmp_path / name for name in ("alone", "traced")]
    for folder in folders:
        folder.mkdir()
    tool = command("record", "--live", "-q", "-o", tmp_path / "live.h5", "--")
    alone, _ = lines_of(folders[0], 2, words)
    traced, said = lines_of(folders[1], 2, words, *tool, status=1)
    assert traced == alone and "Error" not in "".join(alone[0])
    assert said.splitlines()[-1] == (
        "prism-record: rank 0: a CUDA graph holds communication, which live capture cannot time; run without CUDA graphs"
    )
    assert not (tmp_path / "live.h5").exists()
