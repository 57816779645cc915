"""Spans that show the host's pace: what is put in their place, and what stays in doubt."""

import numpy as np

from prism_tools.calibrate.hostbound import AT_ONCE, host_bound
from prism_tools.graph.model import Program
from prism_tools.graph.schema import NODE_COLUMNS, Kind

HOST, STREAM = 0, 2
LATE, NOW = 10 * AT_ONCE, AT_ONCE // 2  # after its issue


def program(iterations):
    """Iterations of a host's span and two spans of a stream."""
    columns = {
        name: np.full(3 * iterations, -1, dtype if dtype != "u1" else "i2") for name, dtype in NODE_COLUMNS.items()
    }
    columns["kind"][:] = Kind.COMPUTE
    columns["lane"] = np.array([HOST, STREAM, STREAM] * iterations)
    columns["segment"] = np.repeat(np.arange(iterations), 3)
    return Program(columns, np.empty((0, 2), np.int32))


def test_a_span_that_the_stream_was_behind_in_is_the_devices_own():
    own = np.array([[10.0, 50, 60, 11, 51, 61]])
    doubt = host_bound(program(2), own, [np.array([NOW, LATE, LATE, NOW, LATE, LATE])])
    assert own.tolist() == [[10, 50, 60, 11, 51, 61]] and not doubt.any()


def test_a_host_bound_span_takes_what_it_took_where_the_host_was_ahead():
    own = np.array([[10.0, 300, 60, 11, 51, 400, 12, 20, 62]])
    behind = [np.array([NOW, NOW, LATE, NOW, LATE, NOW, NOW, NOW, LATE])]
    doubt = host_bound(program(3), own, behind)
    assert own.tolist() == [[10, 51, 60, 11, 51, 61, 12, 20, 62]], "never more than it showed; median of 60 and 62"
    assert not doubt.any()


def test_the_host_never_ahead_leaves_everything_between_nothing_and_what_was_shown():
    own = np.array([[10.0, 300, 60], [10.0, 280, 62]])
    behind = [np.array([NOW, NOW, LATE]), np.array([NOW, NOW, LATE])]
    doubt = host_bound(program(1), own, behind)
    assert own.tolist() == [[10, 150, 60], [10, 140, 62]] and doubt.tolist() == [0, 150, 0]


def test_other_runs_of_the_same_slice_count_too():
    own = np.array([[10.0, 300, 60], [10.0, 70, 62]])
    host_bound(program(1), own, [np.array([NOW, NOW, LATE]), np.array([NOW, LATE, LATE])])
    assert own[:, 1].tolist() == [70, 70]


def test_programs_without_streams_are_left_alone():
    own = np.array([[10.0, 50, 60]])
    plain = program(1)
    plain.columns["lane"][:] = HOST
    assert not host_bound(plain, own, [np.zeros(3)]).any() and own.tolist() == [[10, 50, 60]]
