"""Recorded ranks get what real gloo gives, or refuse as it refuses, in every use of torch.distributed of live_suite.py."""

import shutil

import pytest

from tests.record.test_live_equal import differences, lines_of, name_of
from tests.tools import program, run, said

# A profile shows what ran, and no gloo ran; a played group counts no operations, and has both kinds of device.
NOT_PLAYED = {"profiled", "group_sequence", "group_of_both_kinds"}


# Of two addends any order gives the same bits; gloo's ring gives its own of more.
@pytest.mark.parametrize(("world", "order"), [(4, "ring"), (2, "rank")])
def test_every_use(world, order, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    expected, _ = lines_of(alone, world, ["--backend", "gloo"])
    words = [program("live_suite.py"), "--out", tmp_path / "lines", "--backend", "gloo"]
    options = ["-n", world, "-j", 2, "-q", "--reduce-order", order]
    run("record", *options, "-o", tmp_path / "bare.h5", "--", *words, cwd=tmp_path)
    found = {rank: (tmp_path / f"lines.{rank}").read_text().splitlines() for rank in range(world)}
    for rank, lines in expected.items():
        assert [name_of(line) for line in found[rank]] == [name_of(line) for line in lines]
        assert len(lines) > 1000 and name_of(lines[-1]) == "end"
        wrong = [line for line in found[rank] if name_of(line) in NOT_PLAYED and "Error: " in line]
        assert wrong == []
    compared = [
        {r: [x for x in lines if name_of(x) not in NOT_PLAYED] for r, lines in ls.items()} for ls in (expected, found)
    ]
    assert differences(*compared) == []


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(real, stages):
    expected = said(real.output("compiled.py", world=4), "check")
    assert len(expected) == 4
    assert stages.recorded("compiled.py", world=4).lines("check") == expected
