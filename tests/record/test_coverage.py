"""Recorded ranks get what real gloo gives, or refuse as it refuses, in every use of torch.distributed of live_suite.py."""

import shutil

import pytest

from tests.record.test_live_equal import differences, lines_of, name_of
from tests.tools import program, run, said

# A profile shows what ran, and no gloo ran; a played group counts no operations, and has both kinds of device.
NOT_PLAYED = {"profiled", "group_sequence", "group_of_both_kinds"}
# Of four addends the ring's order gives other last bits than the ranks' order; of two addends these are equal too.
ORDERED = {
    "model_ddp",
    "model_ddp_static",
    "model_ddp_bucket_view",
    "model_ddp_fp16",
    "model_ddp_no_sync",
    "model_zero_optimizer",
    "model_fsdp2",
    "model_fsdp2_mixed_precision",
    "model_hsdp",
    "model_dtensor",
    "model_tensor_parallel",
    "model_sequence_parallel",
}


@pytest.mark.parametrize(("world", "apart"), [(4, NOT_PLAYED | ORDERED), (2, NOT_PLAYED)])
def test_every_use(world, apart, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    expected, _ = lines_of(alone, world, ["--backend", "gloo"])
    words = [program("live_suite.py"), "--out", tmp_path / "lines", "--backend", "gloo"]
    run("record", "-n", world, "-j", 2, "-q", "-o", tmp_path / "bare.h5", "--", *words, cwd=tmp_path)
    found = {rank: (tmp_path / f"lines.{rank}").read_text().splitlines() for rank in range(world)}
    for rank, lines in expected.items():
        assert [name_of(line) for line in found[rank]] == [name_of(line) for line in lines]
        assert len(lines) > 1000 and name_of(lines[-1]) == "end"
        wrong = [line for line in found[rank] if name_of(line) in apart and "Error: " in line]
        assert wrong == []
    compared = [
        {r: [x for x in lines if name_of(x) not in apart] for r, lines in ls.items()} for ls in (expected, found)
    ]
    assert differences(*compared) == []


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(real, stages):
    expected = said(real.output("compiled.py", world=4), "check")
    assert len(expected) == 4
    assert stages.recorded("compiled.py", world=4).lines("check") == expected
