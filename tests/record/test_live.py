"""prism-record --live on CPUs: what the graph of a real gloo job says, and what happens when ranks leave no trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prism_tools.calibrate import calibrate
from prism_tools.capture.live import program_of
from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.graph.schema import EPILOGUE, PROLOGUE, Kind, Op, Source

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def live(folder, command, *options):
    """(done process, graph's path) of prism-record --live."""
    output = folder / "live.h5"
    tool = [sys.executable, ROOT / "bin" / "prism-record", "--live", "-o", output, *options, "--", *command]
    done = subprocess.run(list(map(str, tool)), capture_output=True, text=True, env=ENVIRONMENT, cwd=folder)
    return done, output


def left(folder):
    return sorted(path.name for path in folder.iterdir())


PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 8) * rank).sum().backward()
    if step == 4 and rank == 1:
        dist.send(torch.ones(5), 0, tag=3)
    if step == 4 and rank == 0:
        dist.recv(torch.ones(5), 1, tag=3)
    optimizer.step()
tensor = torch.full((3,), rank + 1.0)
dist.all_reduce(tensor)
sys.stdout.write(f"sum {tensor.tolist()} {sys.argv[1:]}\\n")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(process, graph) of the whole program, W = 2."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "program.py").write_text(PROGRAM)
    done, output = live(folder, [*TORCHRUN, "2", "program.py", "--lr", "3"])
    return done, file.read(output), left(folder)


def test_the_program_runs_as_it_is(whole):
    done, _, files = whole
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [3.0, 3.0, 3.0] ['--lr', '3']") == 2
    assert files == ["live.h5", "program.py"]


def test_its_graph_is_measured_and_valid(whole):
    _, graph, _ = whole
    assert (graph.stage, graph.world_size, graph.launch.argv) == ("sliced", 2, ["program.py", "--lr", "3"])
    assert check(graph) == [] and graph.timing.rank.tolist() == [0, 1] and graph.timing.slice.tolist() == [0, 0]
    assert graph.groups.backend == ["gloo"] and graph.groups.members[0].tolist() == [0, 1]
    assert (graph.memory.rss > 50 << 20).all() and graph.memory.allocated.tolist() == [-1, -1]
    assert graph.timing.clock_error.tolist() == [0, 0], "one machine, one clock"
    assert (
        graph.launch.hash_seed == -1 and graph.launch.nproc_per_node == 2 and graph.ranks.local_rank.tolist() == [0, 1]
    )


def test_its_nodes_are_the_programs(whole):
    _, graph, _ = whole
    program = graph.program_of(0)
    comm = program.kind == Kind.COMM
    steps = [int(np.sum(comm & (program.segment == k) & (program.op == Op.ALL_REDUCE))) for k in range(6)]
    assert steps == [1] * 6
    odd = np.flatnonzero(comm & (program.op == Op.RECV))
    assert program.segment[odd].tolist() == [4] and graph.values_of(0).bytes[odd].tolist() == [20]
    assert np.isin(program.segment, (PROLOGUE, EPILOGUE, *range(6))).all()
    assert graph.strings[program.callsite[odd[0]]] == "program.py:13 <module>"


def test_it_calibrates_from_its_own_durations(whole):
    _, graph, _ = whole
    solved = calibrate(graph)
    inside = [solved.durations.source[row][solved.program_of(rank).segment >= 0] for rank, row in enumerate([0, 1])]
    assert all((source == Source.REAL).all() for source in inside)
    measured = np.mean([times[1:] for times in graph.timing.iteration_ns])
    assert abs(solved.timeline.iteration_time_ns / measured - 1) < 0.5


def test_it_cannot_play_ranks(whole, tmp_path):
    _, graph, _ = whole
    file.write(graph, str(tmp_path / "live.h5"))
    slice_ = [
        sys.executable,
        ROOT / "bin" / "prism-slice",
        tmp_path / "live.h5",
        "-s",
        "1",
        "-o",
        tmp_path / "sliced.h5",
    ]
    done = subprocess.run(list(map(str, slice_)), capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        1, "prism-slice: the graph of a live job holds no values for virtual ranks to send; "
        "record the program with prism-record -n 2\n"
    )  # fmt: skip


def test_the_program_outlives_the_window(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done, output = live(tmp_path, [*TORCHRUN, "2", "program.py"], "--warmup", "1", "--iterations", "2")
    graph = file.read(output)
    assert done.stdout.count("sum [3.0, 3.0, 3.0]") == 2
    assert graph.iterations() == 3 and graph.launch.stop_after == 3
    assert not (graph.program_of(0).op == Op.RECV).any(), "step 4 came after the window"


SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, port):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=rank, world_size=3)
    half = dist.new_group([0, 2])
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.ones(2), group=half)
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, (0,), nprocs=3)
"""


def test_ranks_that_the_program_spawns_itself(tmp_path):
    (tmp_path / "program.py").write_text(SPAWN)
    done, output = live(tmp_path, [sys.executable, "program.py"])
    assert done.returncode == 0, done.stderr
    graph = file.read(output)
    ops = [graph.program_of(rank).op[graph.program_of(rank).kind == Kind.COMM].tolist() for rank in range(3)]
    assert ops == [[Op.BARRIER, Op.ALL_REDUCE, Op.BARRIER], [Op.BARRIER] * 2, [Op.BARRIER, Op.ALL_REDUCE, Op.BARRIER]]
    assert sorted(members.tolist() for members in graph.groups.members) == [[0, 1, 2], [0, 2]]


def error(folder, command, *options):
    done, output = live(folder, command, *options)
    assert not output.exists() and left(folder) in ([], ["program.py"]), left(folder)
    return done.returncode, done.stderr.splitlines()[-1]


def test_no_such_command(tmp_path):
    assert error(tmp_path, ["no-such-launcher", "train.py"]) == (
        127, "prism-record: no-such-launcher: no such command; give a launcher, such as torchrun or srun"
    )  # fmt: skip


def test_a_command_without_a_process_group(tmp_path):
    status, line = error(tmp_path, [sys.executable, "-c", "import torch"])
    assert status == 1 and line.startswith(
        "prism-record: no rank left a trace: install prism-tools in the program's own"
    )


def test_a_command_that_fails_before_it_begins(tmp_path):
    status, line = error(tmp_path, [sys.executable, "-c", "raise SystemExit(7)"])
    assert status == 7 and line.startswith("prism-record: the command ended with status 7; no rank left a trace")


KILLED = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(KILLED)
    status, line = error(tmp_path, [*TORCHRUN, "2", "program.py"])
    assert status == 1 and "left no trace: they were killed, or another node cannot write here" in line


def test_a_program_that_fails_keeps_its_graph_and_its_status(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + "raise SystemExit(5)\n")
    done, output = live(tmp_path, [*TORCHRUN, "2", "program.py"])
    assert done.returncode == 1 and file.read(output).iterations() == 6, "torchrun's own status"


def test_an_interrupt_ends_the_command_and_leaves_nothing(tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    command = [sys.executable, "-c", f"import time; open({str(ready)!r}, 'w').write('x'); time.sleep(600)"]
    tool = [sys.executable, ROOT / "bin" / "prism-record", "--live", "-o", tmp_path / "live.h5", "--", *command]
    process = subprocess.Popen(list(map(str, tool)), env=ENVIRONMENT)
    ready.read_text()  # the command is running
    process.send_signal(signal.SIGTERM)
    before = time.monotonic()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM and time.monotonic() - before < 30
    assert left(tmp_path) == ["ready"]
    gone = subprocess.run(["pgrep", "-f", str(ready)], capture_output=True, text=True)
    assert gone.stdout == ""


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["python", "-u", "train.py", "-x"], ["train.py", "-x"]),
        (["python3", "-X", "dev", "-m", "pkg.train", "a"], ["-m", "pkg.train", "a"]),
        (["python", "-W", "error", "-c", "print()"], ["-c", "print()"]),
    ],
)
def test_the_program_of_an_interpreters_command_line(command, program):
    assert program_of(command) == program
