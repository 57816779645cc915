"""What a recording holds: each rank's nodes, iterations, payloads and store, and nothing of the user's secrets."""

import numpy as np
import pytest

from prism_tools.emulate.sandbox import open_payloads
from prism_tools.graph import file
from prism_tools.graph.schema import Kind, Op
from prism_tools.launch.program import allowed_environment
from tests.same import check_same
from tests.tools import SECRETS, Bench, run

GPT8 = ["--tp", "2", "--pp", "2"]
NAMES = [("gpt.py", GPT8, 8), ("collectives.py", [], 4), ("moe.py", [], 4), ("fsdp2.py", [], 4), ("no_marks.py", [], 4)]


@pytest.mark.parametrize(("name", "arguments", "world"), NAMES)
def test_its_invariants_hold(name, arguments, world, stages, tmp_path):
    bare = stages.recorded(name, *arguments, world=world)
    run("inspect", "check", bare.path, cwd=tmp_path)
    graph = file.read(bare.path)
    assert (graph.stage, graph.world_size, graph.complete) == ("bare", world, True)
    for rank in range(world):
        check_host_order(graph.program_of(rank))


def check_host_order(program):
    """On the host's lane spans and events alternate, but for spans that end in an issue; waits have what they wait for."""
    kind, lane, edges = program.kind, program.lane, program.edges
    host = np.flatnonzero(lane == 0)
    assert kind[0] == Kind.COMPUTE
    for before, after in zip(host[:-1].tolist(), host[1:].tolist(), strict=True):
        issues = [node for node in range(before + 1, after) if lane[node] == 1]
        assert (kind[after] == Kind.COMPUTE) != (kind[before] == Kind.COMPUTE) or issues
    pool = np.flatnonzero(lane == 1)
    assert (kind[pool] == Kind.COMM).all()
    issued = {int(target): int(source) for source, target in edges if lane[target] == 1}
    assert sorted(issued) == pool.tolist()
    assert all(source == node - 1 and kind[source] == Kind.COMPUTE for node, source in issued.items())
    waits = np.flatnonzero(kind == Kind.WAIT)
    assert set(waits.tolist()) == {int(target) for source, target in edges if kind[target] == Kind.WAIT}
    assert all(kind[source] == Kind.COMM and lane[source] == 1 for source, target in edges if kind[target] == Kind.WAIT)


def test_nodes_of_the_smallest_program(sums):
    """Three steps of two synchronous sums each, then a message from rank 3 to rank 0."""
    graph = file.read(sums["bare"])
    step = [Kind.COMPUTE, Kind.COMM] * 2 + [Kind.COMPUTE, Kind.MARK]
    expected = {0: step * 3 + [Kind.COMPUTE, Kind.COMM], 1: step * 3}
    for rank, like in ((0, 0), (1, 1), (2, 1), (3, 0)):
        columns = graph.program_of(rank).columns
        assert columns["kind"].tolist() == expected[like], rank
        assert not columns["lane"].any() and not len(graph.program_of(rank).edges)
        assert columns["segment"][:18].tolist() == [0] * 6 + [1] * 6 + [2] * 6
        assert graph.values_of(rank).bytes[1::2].tolist()[:3] == [16, 8, 0]
    assert graph.ranks.program[1] == graph.ranks.program[2] and len(graph.programs) == 3
    assert [int(graph.program_of(rank).op[-1]) for rank in (0, 3)] == [Op.RECV, Op.SEND]
    assert [int(graph.program_of(rank).peer[-1]) for rank in (0, 3)] == [3, 1]
    assert [int(graph.values_of(rank).bytes[-1]) for rank in (0, 3)] == [12, 12]
    assert graph.strings[graph.program_of(1).callsite[1]] == "sums.py:12 <module>"


def test_iterations_of_gpt(stages):
    graph = file.read(stages.recorded("gpt.py", "--pp", "2", world=4).path)
    assert graph.iterations() == 4
    for rank in range(4):
        program_ = graph.program_of(rank)
        kinds = [[Kind(kind).name for kind in program_.kind[program_.segment == k]] for k in range(4)]
        assert kinds[2] == kinds[3] and kinds[2][-1] == "MARK"  # DDP rebuilds its buckets in iteration 1
        assert (program_.segment == -2).any()  # the last barrier
    without_marks = file.read(stages.recorded("no_marks.py", world=4).path)
    segments = without_marks.program_of(0).segment
    assert sorted(set(segments[segments >= 0].tolist())) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("arguments", "world"), [(["--pp", "2"], 4), (GPT8, 8)])
def test_how_many_run_at_a_time_does_not_show(arguments, world, stages):
    paths = [stages.recorded("gpt.py", *arguments, world=world, jobs=jobs).path for jobs in (1, 2)]
    check_same(*paths)


def test_payloads_are_the_contributions(sums):
    graph = file.read(sums["bare"])
    reader = open_payloads(graph, sums["bare"])
    ones = np.ones((2, 2), np.float32).tobytes()
    assert [bytes(reader.get(rank, 1)) for rank in range(4)] == [ones] * 4
    assert bytes(reader.get(3, 19)) == np.full(3, 3, np.float32).tobytes()
    assert reader.get(0, 19) is None  # what it receives is what rank 3 sent
    # All ranks contribute the same, which is stored once: head, three times both gradients, and the message.
    assert graph.payload.bytes == 24 + 3 * (16 + 8) + 12 and graph.payload.mode == "all"


def test_the_store_s_log(stages):
    graph = file.read(stages.recorded("store.py", world=4).path)
    rows = list(zip(graph.store.rank.tolist(), graph.store.op, graph.store.key, graph.store.value, strict=True))
    mine = [(rank, op, key.rpartition("/")[2], value) for rank, op, key, value in rows]  # torch puts prefixes before
    assert sorted(row for row in mine if row[2].startswith("name")) == [
        (rank, "set", f"name{rank}", f"rank {rank}".encode()) for rank in range(4)
    ]
    assert sorted(row[3] for row in mine if row[2] == "sum" and row[3] != b"0") == [b"1", b"2", b"3", b"4"]
    assert [row for row in mine if row[2] == "choice"] == [(0, "compare_set", "choice", b"first")]


def test_only_allowed_variables_are_in_the_file(sums):
    """The recording ran with these variables set (tests/tools.py)."""
    data, graph = sums["bare"].read_bytes(), file.read(sums["bare"])
    assert all(name.encode() not in data for name in SECRETS if name != "MKL_DYNAMIC")
    assert b"sesame" not in data
    assert graph.launch.env["MKL_DYNAMIC"] == "FALSE"


def test_allowed_environment(monkeypatch):
    for name in list(allowed_environment()):
        monkeypatch.delenv(name)
    wanted = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "TORCH_LOGS": "", "PYTHONPATH": "/a:/b", "LC_ALL": "C"}
    others = (
        "HOME",
        "TORCHELASTIC_RUN_ID",
        "AWS_REGION",
        "GLOO_API_KEY",
        "NCCL_PASSWORD",
        "TORCH_Secret",
        "OMP_TOKENS",
    )
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    for name in others:
        monkeypatch.setenv(name, "x")
    assert allowed_environment() == wanted


def test_the_same_seeds_in_every_run(bench: Bench):
    """Python's, NumPy's and torch's generators start as they did in the recording; str hashes too."""
    (bench.out / "seeds.py").write_text(
        "import random, numpy, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "row = random.random(), numpy.random.rand(), torch.rand(1).item(), hash('text')\n"
        "print(f'check rank {dist.get_rank()} seeds {row}\\n', end='', flush=True)\n"
        "dist.barrier()\n"
    )
    recorded = bench.run("record", "-n", 2, "-o", "bare.h5", "--", "seeds.py").lines("check")
    assert len({line.split()[4] for line in recorded}) == 2  # ranks differ
    again = bench.run("slice", "run", "-v", "bare.h5", "-s", 1, "--no-probe", "-o", "sliced.h5")
    assert again.lines("check") == recorded


def test_a_module_and_its_arguments(bench):
    package = bench.out / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint('check rank 0', sys.argv[1:], __name__, flush=True)\n")
    done = bench.run("record", "-n", 1, "-o", "run.h5", "--", "-m", "package.train", "--a", "b c")
    assert done.stdout == "check rank 0 ['--a', 'b c'] __main__\n"
    assert file.read(bench.out / "run.h5").launch.argv == ["-m", "package.train", "--a", "b c"]


def test_place_of_a_rank(bench):
    (bench.out / "place.py").write_text(
        "import os\n"
        "names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE'\n"
        "print('check rank ' + ' '.join(os.environ[name] for name in names) + '\\n', end='', flush=True)\n"
    )
    done = bench.run("record", "-n", 6, "-j", 2, "--nproc-per-node", 4, "-o", "run.h5", "--", "place.py")
    assert done.lines("check") == [f"check rank {rank} 6 {rank % 4} 4 {rank // 4} 2" for rank in range(6)]
    graph = file.read(bench.out / "run.h5")
    assert graph.ranks.local_rank.tolist() == [0, 1, 2, 3, 0, 1] and graph.ranks.node.tolist() == [0, 0, 0, 0, 1, 1]
