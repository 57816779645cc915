"""Traces of ranks that did the same are kept once, and make one class."""

import copy

import numpy as np

from prism_tools.capture.calls import Call
from prism_tools.capture.trace import POOL_LANE, Tracer
from prism_tools.graph.schema import Op
from prism_tools.record.build import Shared


def trace(operations):
    tracer = Tracer()
    for op in operations:
        tracer.operation(Call(op), 0, POOL_LANE, 0)
    return tracer.export(0, [(0, 1)]) | {"slots": [("0", "gloo", (0, 1))], "rss": 5}


def test_equal_traces_are_the_same_arrays():
    shared = Shared()
    one = trace([Op.ALL_REDUCE, Op.BARRIER])
    first, second = shared.trace(one), shared.trace(copy.deepcopy(one))
    assert all(first["columns"][name] is second["columns"][name] for name in first["columns"])
    assert first["edges"] is second["edges"] and first["bytes"] is second["bytes"] and first["slots"] is second["slots"]
    for name, column in one["columns"].items():
        assert np.array_equal(first["columns"][name], column) and first["columns"][name].dtype == column.dtype
    assert second["rss"] == 5 and "times" not in second


def test_arrays_of_other_shapes_or_types_are_others():
    shared = Shared()
    empty = shared.trace(trace([]))
    assert empty["edges"].shape == (0, 2) and empty["columns"]["callsite"].shape == (0,)
    other = shared.trace(trace([Op.ALL_REDUCE]))
    again = shared.trace(trace([Op.BROADCAST]))
    assert other["columns"]["op"] is not again["columns"]["op"]
