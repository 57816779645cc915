"""The clock of another machine against this one's."""

import time

import pytest

from prism_tools.capture.clock import Clock, Sample, between, compare, reading

SECOND = 10**9


def test_a_clock_and_itself():
    before = time.monotonic_ns()
    sample = compare(reading)
    assert (sample.offset, sample.error) == (0, 0) and before <= sample.at <= time.monotonic_ns()


@pytest.mark.parametrize("ahead", [1000 * SECOND, -7 * SECOND])
def test_another_machine_s(ahead):
    """The offset brings its times to ours, within the error, which the round trip bounds."""
    sample = compare(lambda: ("another", time.monotonic_ns() + ahead))
    assert abs(sample.offset + ahead) <= sample.error < SECOND
    clock = Clock(sample.offset)
    assert clock.to_ours(clock.to_theirs(5)) == 5 and abs(clock.to_ours(ahead) - 0) <= sample.error


def test_the_best_of_many_counts():
    """A late answer says little; of all round trips the shortest is taken."""
    trips = iter([0] * 3 + [1] * 10 + [0] * 3)  # this process may be interrupted in some of them

    def ask():
        if not next(trips):
            until = time.monotonic_ns() + 3_000_000
            while time.monotonic_ns() < until:
                pass
        return "another", time.monotonic_ns()

    assert compare(ask).error < 1_000_000


def test_drift():
    clock = between(Sample(0, 5000, 40), Sample(100 * SECOND, 3000, 60))
    assert (clock.offset, clock.drift, clock.error) == (5000, -20, 60)  # 2 us in 100 s


def test_two_machines_by_a_third():
    one, two = Sample(0, 1000, 3), Sample(1, 400, 4)
    assert one.beyond(two) == Sample(0, 600, 7)
    assert one.beyond(one) == Sample(0, 0, 0)
