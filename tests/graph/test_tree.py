"""The layout: every field is needed, typed and measured; anything else is refused with the name of the field."""

import copy

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.results import RESULTS
from prism_tools.graph.schema import ReduceOrder
from prism_tools.graph.structure import structure_problem
from prism_tools.graph.tree import PARTS, from_tree, to_tree
from tests.graph.builder import add_results, differences, train4

OPTIONAL = (
    *RESULTS, "launch/reduce_order", "timing/iteration_ns", "probes/processes", "durations/bias", "replay/timing/iteration_ns",
)  # fmt: skip
# Their lengths are their own: a shorter one is another graph, not damage.
FREE = ("timeline/iteration_ns", "timeline/critical", "steady/critical")


def full_graph():
    graph = train4()
    add_results(graph)
    return graph


TREE = to_tree(full_graph())


def paths(tree: dict, path: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found.append(path + name)
        if isinstance(value, dict):
            found += paths(value, f"{path}{name}/")
    return found


def value_at(path: str):
    value = TREE
    for name in path.split("/"):
        value = value[name]
    return value


def changed(path: str, *values: object) -> dict:
    """The full tree with another value at ``path``, or with none."""
    tree = folder = copy.deepcopy(TREE)
    *names, last = path.split("/")
    for name in names:
        folder = folder[name]
    del folder[last]
    for value in values:
        folder[last] = value
    return tree


def refused(tree: dict) -> str:
    """Why reading this tree is refused, or ""."""
    try:
        return structure_problem(from_tree(tree))
    except PrismError as error:
        return str(error)


PATHS = [path for path in paths(TREE) if path not in ("format", "version")]  # these are the file's business
ARRAYS = [path for path in PATHS if isinstance(value_at(path), np.ndarray)]


def test_tree_and_back():
    assert differences(full_graph(), from_tree(TREE)) == []


def test_root_holds_the_parts_in_order():
    scalars = ["format", "version", "stage", "world_size", "complete"]
    assert list(TREE) == scalars + list(PARTS)
    assert list(to_tree(train4())) == scalars + list(PARTS[: -len(RESULTS)])


def test_missing_fields_are_named():
    for path in PATHS:
        if path not in OPTIONAL:
            assert f"/{path} is missing; make the file again" in refused(changed(path)), path


def test_fields_of_another_type_are_named():
    for path in PATHS:
        for wrong in (None, 1.5, np.array(["a"], object), np.zeros(3, "f4"), {}):
            assert path.split("/")[0] in refused(changed(path, wrong)), (path, wrong)


def test_fields_of_another_length_are_refused():
    for path in ARRAYS:
        if path not in FREE:
            old = value_at(path)
            longer = np.concatenate([old, old[:1]]) if len(old) else np.zeros_like(old, shape=1)
            assert refused(changed(path, longer)), path


def test_offsets_out_of_range_are_refused():
    for path in ARRAYS:
        if path.endswith("offset") and "clock" not in path:
            for position, value in ((0, 1), (0, -1), (-1, 10**9), (1, 10**9), (1, -5)):
                offset = value_at(path).copy()
                offset[position] = value
                assert refused(changed(path, offset)), (path, position, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ranks/program", 1), ("ranks/values", -1), ("ranks/slots/data", 5), ("groups/members/data", 4),
        ("programs/slot", 3), ("programs/lane", 2), ("programs/kind", 4), ("programs/op", 13), ("programs/dtype", 17),
        ("programs/reduce", 10), ("programs/callsite", 10**6), ("programs/edges", -1), ("programs/peer", 2),
        ("durations/row", 4), ("durations/source", 6), ("timeline/row", -1), ("timeline/critical", 99), ("steady/critical", 99),
        ("timing/rank", 4), ("memory/rank", -1), ("store/rank", 4), ("probes/op", 13), ("replay/timing/rank", 77),
    ],
)  # fmt: skip
def test_reference_out_of_range_is_refused(path, value):
    assert refused(changed(path, np.full_like(value_at(path), value)))


def test_world_of_nobody_and_unknown_stage_are_refused():
    for name, value in (("world_size", 0), ("world_size", 5), ("stage", "burnt")):
        assert refused(changed(name, value))


def test_order_of_sums():
    """Files of before have none: they were added in the order of ranks."""
    assert from_tree(changed("launch/reduce_order")).launch.reduce_order is ReduceOrder.RANK
    assert from_tree(changed("launch/reduce_order", "ring")).launch.reduce_order is ReduceOrder.RING
    assert "/launch@reduce_order is no order" in refused(changed("launch/reduce_order", "burnt"))


def test_environment_that_is_no_json_object_is_refused():
    for text in (b"{", b"[1]"):
        packed = {"offset": np.array([0, len(text)]), "utf8": np.frombuffer(text, np.uint8)}
        assert "/environment/json is not" in refused(changed("environment/json", packed))


def test_other_byte_order_is_read():
    tree = changed("programs/lane", value_at("programs/lane").astype(">i2"))
    assert from_tree(tree).programs[0].lane.tolist() == train4().programs[0].lane.tolist()


def test_rows_of_unequal_length_are_a_mistake_of_the_writer():
    graph = full_graph()
    graph.timing.end = [row[:-1] for row in graph.timing.end]
    with pytest.raises(ValueError, match="end has rows of other lengths than host_issue"):
        to_tree(graph)
