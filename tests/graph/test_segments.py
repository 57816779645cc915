"""Segments: where iterations begin and end in programs with and without optimizer steps."""

import numpy as np

from tests.graph.builder import build, comm, compute, step, wait


def segments(*nodes) -> list[int]:
    """The segments that the builder's call of find_segments gives."""
    found = build(2, {"w": [0, 1], "v": [0, 1]}, lambda rank: list(nodes)).programs[0].segment
    assert found.dtype == np.int32
    return found.tolist()


def setup(at: str = "a.py:1 main"):
    return comm("barrier", "w", at=at)


def grad(at: str = "a.py:5 loop", group: str = "w"):
    return comm("all_reduce", group, 4, at=at)


def test_steps_end_iterations():
    found = segments(
        compute(), setup(), compute(), grad(), compute(), step(), compute(), grad(), compute(), step(), compute()
    )
    assert found == [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, -2]


def test_one_step_has_no_prologue():
    assert segments(compute(), setup(), compute(), grad(), compute(), step(), compute()) == [0, 0, 0, 0, 0, 0, -2]


def test_steps_without_communication_between_them_are_one_iteration():
    body = [grad(), compute(), step("a.py:7 loop"), compute(), step("a.py:8 loop")]
    assert segments(*body, *body) == [0] * 5 + [1] * 5


def test_waits_between_steps_do_not_part_them():
    body = [comm("all_reduce", "w", 4, is_async=True, name="a"), step(), wait("a"), step()]
    assert segments(compute(), *body, *body) == [0] * 5 + [1] * 4


def test_program_that_never_communicates_ends_an_iteration_at_each_step():
    assert segments(compute(), step(), compute(), step(), compute()) == [0, 0, 1, 1, -2]


def test_prologue_ends_with_the_last_operation_that_does_not_come_again():
    # The first gradient exchange is also in the prologue, but comes again; the broadcast at line 2 does not.
    found = segments(
        grad(),
        comm("broadcast", "w", 4, root=0, at="a.py:2 main"),
        wait(at="a.py:3 main"),
        grad(),
        step(),
        grad(),
        step(),
    )
    assert found == [-1, -1, -1, 0, 0, 1, 1]


def test_same_line_with_another_operation_is_another_operation():
    found = segments(comm("broadcast", "w", 4, root=0, at="a.py:5 loop"), grad(), step(), grad(), step())
    assert found == [-1, 0, 0, 1, 1]


def test_nothing_is_prologue_if_everything_comes_again():
    assert segments(compute(), grad(), step(), compute(), grad(), step()) == [0, 0, 0, 1, 1, 1]


def test_without_steps_the_repeating_tail_is_found():
    found = segments(compute(), setup(), compute(), grad(), compute(), grad(), compute(), grad(), compute())
    assert found == [-1, -1, 0, 0, 1, 1, 2, 2, -2]


def test_equal_neighbours_do_not_hide_the_longer_period():
    body = [grad(group="v"), compute(), grad(), grad(), compute()]
    assert segments(setup(), *body, *body, *body) == [-1] + [0] * 4 + [1] * 5 + [2] * 5 + [-2]


def test_waits_belong_to_the_period_of_their_communication():
    body = [compute(), comm("all_reduce", "w", 4, is_async=True, name="a"), compute(), wait("a")]
    assert segments(compute(), setup(), *body, *body, compute()) == [-1, -1] + [0] * 4 + [1] * 4 + [-2]


def test_final_operation_that_happens_once_is_epilogue():
    found = segments(setup(), grad(), compute(), grad(), compute(), setup("a.py:9 main"), compute())
    assert found == [-1, 0, 1, 1, -2, -2, -2]


def test_incomplete_first_period_is_prologue():
    a, b = grad("a.py:5 loop"), grad("a.py:6 loop")
    assert segments(b, a, b, a, b) == [-1, 0, 0, 1, 1]


def test_without_repetition_everything_is_prologue():
    assert segments(compute(), setup(), compute(), grad(), compute()) == [-1] * 5
    assert segments(compute()) == [-1]
    assert segments() == []


def test_long_sequences_are_searched_in_linear_time():
    body = [grad(f"a.py:{k} loop") for k in range(20)]
    found = segments(setup(), *body * 400)
    assert found[0] == -1 and found[1:] == [k for k in range(400) for _ in range(20)]
