"""Programs of each framework, unmodified: under prism-record they compute what they compute under torchrun and gloo, bit for
bit, and slices and replays of the graph compute it again. ``make test-frameworks`` runs this in each framework's environment.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from prism_tools.graph import file
from prism_tools.graph.check import check
from tests.tools import environment, said

HOME = Path(sys.prefix)
if HOME.parent.name != "frameworks":
    pytest.skip("each framework has an environment of its own: make test-frameworks", allow_module_level=True)

HERE = Path(__file__).parent
LIMIT = 600  # seconds for a real run, far more than any needs
RING = ("--reduce-order", "ring")
CUDA = (*RING, "--pretend-cuda")  # a program for GPUs alone
# Name of the environment: name of the case: program, ranks, options of prism-record, arguments, lines with a loss.
CASES = {
    "hf": {
        "ddp": ("hf.py", 2, RING, [], 2 * 4),
        "fsdp": ("hf.py", 2, CUDA, ["--fsdp"], 2 * 4),
    },
    "lightning": {
        "ddp": ("lightning_gpt.py", 2, RING, [], 2 * 5),
        "fsdp": ("lightning_gpt.py", 2, CUDA, ["--strategy", "fsdp", "--accelerator", "cuda"], 2 * 5),
    },
    "deepspeed": {f"zero{stage}": ("deepspeed_gpt.py", 2, RING, ["--stage", stage], 2 * 8) for stage in (1, 2, 3)},
    "megatron": {
        "dense": ("megatron_gpt.py", 4, CUDA, [], 2 * 3),
        "experts": ("megatron_gpt.py", 8, CUDA, ["--chunks", 2, "--experts", 4, "--ep", 2], 4 * 3),
    },
    "titan": {"fsdp2": ("titan.py", 2, CUDA, [], 2 * 3)},
}[HOME.name]


@pytest.fixture(scope="module", autouse=True)
def settings():
    """What frameworks look for elsewhere, on a hub or on other devices; and DeepSpeed's operator, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(HOME / "extensions"))
        if HOME.name == "deepspeed":
            build = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
            subprocess.run([sys.executable, "-c", build], env=environment(), check=True, timeout=LIMIT)
        yield


def torchrun(*command, world):
    """What the ranks of a real run print."""
    for _ in range(3):  # DeepSpeed once aborted at its end: "terminate called without an active exception"
        child = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *command],
            env=environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = child.communicate(timeout=LIMIT)
        finally:
            child.terminate()  # and it ends its ranks
            child.wait()
        if child.returncode == 0 or "SIGABRT" not in err:
            break
    assert child.returncode == 0, err
    return out


def recorded(stages, case):
    program, world, options, arguments, _ = CASES[case]
    return stages.recorded(HERE / "programs" / program, *arguments, world=world, options=options)


@pytest.mark.parametrize("case", CASES)
def test_recorded_losses_are_those_of_torchrun(case, stages):
    program, world, options, arguments, lines = CASES[case]
    pretend = [HERE / "on_cpus.py"] if options is CUDA else []
    expected = said(torchrun(*map(str, [*pretend, HERE / "programs" / program, *arguments]), world=world), "loss")
    assert len(expected) == len(set(expected)) == lines
    bare = recorded(stages, case)
    assert bare.lines("loss") == expected
    assert check(file.read(bare.path)) == []


@pytest.mark.parametrize("case", CASES)
def test_sliced_and_replayed_losses_are_the_recorded_ones(case, stages):
    bare = recorded(stages, case)
    sliced = stages.sliced(bare, "-v")  # and says what its ranks print
    assert sliced.lines("loss") == bare.lines("loss")
    assert check(file.read(sliced.path)) == []
    last = CASES[case][1] - 1
    replayed = stages.replayed(stages.calibrated(sliced), str(last))
    assert replayed.lines("loss") == bare.lines("loss", {last}) != []
    graph = file.read(replayed.path)
    assert check(graph) == []
    assert graph.stage == "replayed" and graph.timeline is not None
