"""Slices run one by one (an array job) and merged: what a single run of all measures, in any order."""

import copy
import itertools

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.slicing.merge import merge
from tests.tools import run


@pytest.fixture(scope="module")
def parts(sums, tmp_path_factory):
    """Folder of slice-0.h5 (asked for by --index), slice-1.h5 (by the array job's variable) and what the latter said."""
    folder = tmp_path_factory.mktemp("parts")
    argv = ["run", sums["bare"], "-s", 2, "--no-probe"]
    run("slice", *argv, "--index", 0, "-o", "slice-0.h5", cwd=folder, SLURM_ARRAY_TASK_ID="1")
    done = run("slice", *argv, "-o", "slice-1.h5", cwd=folder, SLURM_ARRAY_TASK_ID="1")
    return folder, done.stderr


def test_one_slice_of_the_plan(parts):
    folder, said = parts
    assert [file.read(folder / f"slice-{k}.h5").timing.rank.tolist() for k in (0, 1)] == [[0, 1], [2, 3]]
    assert said == ("prism-slice: warning: only slice 1, by SLURM_ARRAY_TASK_ID; --index or --ranks name others\n")


def test_ranks_stand_above_the_array(sums, tmp_path):
    argv = ["run", sums["bare"], "-s", 1, "--no-probe", "--ranks", 0, "-o", "x.h5"]
    assert run("slice", *argv, cwd=tmp_path, SLURM_ARRAY_TASK_ID="3").stderr == ""
    assert file.read(tmp_path / "x.h5").timing.rank.tolist() == [0]


@pytest.mark.parametrize(
    "index, status, message",
    [("2", 1, "{bare}: no slice 2 (the plan has 0-1)"), ("-1", 2, "SLURM_ARRAY_TASK_ID: '-1' is no whole number >= 0")],
)
def test_no_such_slice(sums, tmp_path, index, status, message):
    argv = ["run", sums["bare"], "-s", 2, "-o", "x.h5"]
    done = run("slice", *argv, cwd=tmp_path, expect=status, SLURM_ARRAY_TASK_ID=index)
    assert done.stderr.splitlines()[-1] == f"prism-slice: {message.format(bare=sums['bare'])}"
    assert not (tmp_path / "x.h5").exists()


def test_merged_in_any_order(parts, sums, tmp_path):
    folder, _ = parts
    names = [folder / "slice-0.h5", folder / "slice-1.h5"]
    run("slice", "merge", *names, "-o", "a.h5", cwd=tmp_path)
    run("slice", "merge", *names[::-1], "-o", "b.h5", cwd=tmp_path)
    a, b, whole = (file.read(path) for path in (tmp_path / "a.h5", tmp_path / "b.h5", sums["sliced"]))
    assert check(a) == [] and a.stage == "sliced" and a.probes is None
    assert a.timing.rank.tolist() == whole.timing.rank.tolist() == [0, 1, 2, 3]
    assert a.timing.slice.tolist() == whole.timing.slice.tolist() == [0, 0, 1, 1]
    assert a.memory.rank.tolist() == [0, 1, 2, 3] and len(a.timing.iteration_ns) == 4
    for name in ("rank", "slice", "repeat", "start", "end", "ready", "host_issue"):
        rows = zip(getattr(a.timing, name), getattr(b.timing, name), strict=True)
        assert all(np.array_equal(mine, other) for mine, other in rows), name
    assert [row["tool"] for row in a.provenance] == ["prism-record"] + ["prism-slice"] * 3
    done = run("slice", "merge", names[0], "-o", "c.h5", cwd=tmp_path)
    assert done.stderr == "prism-slice: warning: ranks 2-3 are in no part; is a slice missing?\n"
    assert (tmp_path / a.payload.path).resolve() == (folder / file.read(names[0]).payload.path).resolve()


def test_probes_of_all_parts_are_kept_once(parts, sums):
    folder, _ = parts
    one, other = (file.read(folder / f"slice-{k}.h5") for k in (0, 1))
    every = file.read(sums["sliced"]).probes
    other.probes = every
    one.probes = copy.copy(every)
    for name in every.__dataclass_fields__:
        setattr(one.probes, name, getattr(every, name)[:1])
    for order in itertools.permutations([("a", one), ("b", other)]):
        _, merged = merge(copy.deepcopy(order))
        assert merged.probes.op.tolist() == every.op.tolist() and len(merged.probes.tails) == len(every.tails)


def test_refused(parts, sums, stages):
    folder, _ = parts
    one, bare = file.read(folder / "slice-0.h5"), file.read(sums["bare"])
    with pytest.raises(PrismError, match="^b: stage bare, no slices to merge; give what prism-slice run wrote"):
        merge([("a", one), ("b", bare)])
    for again in "ab":
        with pytest.raises(
            PrismError, match=f"^a: holds a run of rank [01] that {again} holds too; give each part once"
        ):
            merge([(again, one), ("a", copy.deepcopy(one))])
    other = file.read(folder / "slice-1.h5")
    other.strings = [*other.strings, "x.py:1"]
    with pytest.raises(PrismError, match="^b: its strings are not those of a; merge slices of one recording"):
        merge([("a", one), ("b", other)])
