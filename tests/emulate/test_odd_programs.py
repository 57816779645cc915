"""Threads, polling, futures, hooks and second lives of groups: the same under real gloo and in every stage."""

import pytest

from tests.tools import said


@pytest.mark.parametrize("jobs", [1, 2])
def test_recorded_as_it_is(jobs, real, stages):
    expected = said(real.output("odd.py", world=4), "check")
    assert len(expected) == 4 * 7 + 2  # only the even ranks receive
    assert stages.recorded("odd.py", world=4, jobs=jobs).lines("check") == expected


@pytest.mark.parametrize("ranks", ["0-1", "1,2", "0-3"])
def test_replayed_as_it_is(ranks, real, stages):
    """Its groups are real (0-1), played by the assistant (1,2), or all real (0-3)."""
    chosen = {"0-1": {0, 1}, "1,2": {1, 2}, "0-3": {0, 1, 2, 3}}[ranks]
    expected = said(real.output("odd.py", world=4), "check", chosen)
    calibrated = stages.calibrated(stages.sliced(stages.recorded("odd.py", world=4)))
    assert expected and stages.replayed(calibrated, ranks).lines("check") == expected


def test_files_left_open_are_flushed(stages, tmp_path):
    stages.recorded("odd.py", tmp_path, world=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["flushed"] * 2
