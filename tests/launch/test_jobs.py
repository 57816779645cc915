"""What can be said about jobs without a Slurm: refusals, and states as submitit asks for them."""

import os

import pytest

from prism_tools.cli.progress import Progress
from prism_tools.errors import PrismError
from prism_tools.launch.jobs import Parts, parts
from tests.tools import run


@pytest.fixture
def slurm_on_path(tmp_path, monkeypatch):
    """A folder with something called sbatch, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text("#!/bin/sh\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("tool, argv", [("slice", ["-s", 1]), ("replay", ["-r", 0])])
def test_without_slurm(tool, argv, tmp_path):
    done = run(tool, "a.h5", *argv, "-o", "b.h5", "--slurm", cwd=tmp_path, expect=1, PATH="/nowhere")
    remedy = "run this where Slurm's commands are, or leave --slurm out"
    assert done.stderr == f"prism-{tool}: --slurm: no sbatch on PATH; {remedy}\n" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv, problem",
    [
        (["-o", "b.h5"], "the jobs read the graph; name its FILE"),
        (["a.h5"], "parts are kept beside it; add -o FILE"),
    ],
)
def test_pipes_are_refused(argv, problem, tmp_path, slurm_on_path):
    done = run("slice", "-s", 1, *argv, "--slurm", cwd=tmp_path, expect=2, PATH=slurm_on_path)
    assert done.stderr == f"prism-slice: --slurm: {problem}\n"


@pytest.mark.parametrize(
    "output, problem",
    [
        ("/dev/null", "is no file, and parts are kept beside it"),
        ("100%.h5", "Slurm replaces % in names of files"),
        ("a\\b.h5", "Slurm replaces \\ in names of files"),
    ],
)
def test_outputs_beside_which_slurm_cannot_write(output, problem, tmp_path, slurm_on_path):
    done = run("slice", "-s", 1, "a.h5", "-o", output, "--slurm", cwd=tmp_path, expect=2, PATH=slurm_on_path)
    assert done.stderr == f"prism-slice: --slurm: {output}: {problem}; write -o elsewhere\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_wrong_graphs_are_refused_before_anything_waits_in_the_queue(sums, tmp_path, slurm_on_path):
    def said(tool, *argv):
        return run(tool, *argv, "-o", "b.h5", "--slurm", cwd=tmp_path, expect=1, PATH=slurm_on_path).stderr

    bare, sliced = sums["bare"], sums["sliced"]
    assert said("replay", "-r", 9, bare) == f"prism-replay: {bare}: no rank 9 (file has 0-3)\n"
    assert said("replay", "-r", 0, bare) == f"prism-replay: {bare}: not calibrated yet; run prism-calibrate first\n"
    assert said("slice", "-s", 2, "--ranks", 9, bare) == f"prism-slice: {bare}: no rank 9 (file has 0-3)\n"
    problem = "has slices already; give the graph that they were made of"
    assert said("slice", "-s", 2, sliced) == f"prism-slice: {sliced}: {problem}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_the_folder_of_parts(tmp_path):
    """The same question, the same folder, until it is answered; another question, another folder; one at a time."""
    graph, output = tmp_path / "a.h5", str(tmp_path / "b.h5")
    graph.write_text("a graph")

    def failing(*words):
        with pytest.raises(KeyError), parts("prism-slice", str(graph), output, words) as folder:
            (folder / "jobs.tsv").touch()
            raise KeyError
        return folder

    first = failing(1)
    assert failing(1) == first and first.parent == tmp_path and first.is_dir()
    others = {failing(2), failing(1, [])}
    graph.write_text("another")
    assert len({first, failing(1), *others}) == 4
    with parts("prism-slice", str(graph), output, [1]) as folder:
        with pytest.raises(PrismError, match="the same command is running; wait for it"):
            with parts("prism-slice", str(graph), output, [1]):
                pass
        assert folder.is_dir()
    assert not folder.exists()


def test_a_list_of_jobs_that_a_kill_has_torn(tmp_path):
    (tmp_path / "first.h5").touch()
    (tmp_path / "jobs.tsv").write_text("12_0\tother\n12_")
    Parts(tmp_path, {"first": ["true"]}, 1, [], Progress("prism-slice")).complete()


def test_a_folder_without_jobs_is_not_kept(tmp_path):
    (tmp_path / "a.h5").touch()
    with pytest.raises(KeyError), parts("prism-slice", str(tmp_path / "a.h5"), str(tmp_path / "b.h5"), []):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def test_states():
    """Every job that the queue does not list is gone; one that is suspended, or may be requeued, is not over."""
    submit = pytest.importorskip("prism_tools.launch.submit")
    watcher = submit.Watcher()
    assert watcher._make_command() is None
    states = ["RUNNING", "SUSPENDED", "CONFIGURING", "PREEMPTED", "NODE_FAIL", "PENDING", "TIMEOUT", "COMPLETED"]
    watcher._registered = {f"7_{k}" for k in range(9)}
    reasons = [*["None"] * 5, "Resources", "TimeLimit", "None"]
    rows = [f"7_{k}|{state}|{reason}\n" for k, (state, reason) in enumerate(zip(states, reasons, strict=True))]
    watcher._info_dict = watcher.read_info("".join(rows) + "8|FAILED|None\n")
    assert [watcher.reason(f"7_{k}") for k in range(9)] == [*[""] * 5, "Resources", "TimeLimit", "", ""]
    assert [watcher.get_state(f"7_{k}", mode="cache") for k in range(9)] == [*states, "GONE"]
    assert [watcher.is_done(f"7_{k}", mode="cache") for k in range(9)] == [False] * 6 + [True] * 3
