"""The layout: every field is needed, typed and measured; anything else is refused with the name of the field."""

import copy

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.structure import structure_problem
from prism_tools.graph.tree import PARTS, from_tree, to_tree
from tests.graph.builder import add_results, differences, train4

OPTIONAL = ("timing", "probes", "memory", "durations", "timeline", "replay", "timing/iteration_ns")
# Their lengths are their own: a shorter one is another graph, not damage.
FREE = ("timeline/iteration_ns", "timeline/critical")


def full_graph():
    graph = train4()
    add_results(graph)
    return graph


TREE = to_tree(full_graph())


def full_tree() -> dict:
    """A tree that may be broken."""
    return copy.deepcopy(TREE)


def paths(tree: dict, path: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found.append(path + name)
        if isinstance(value, dict):
            found += paths(value, f"{path}{name}/")
    return found


def at(tree: dict, path: str) -> tuple[dict, str]:
    *folders, name = path.split("/")
    for folder in folders:
        tree = tree[folder]
    return tree, name


def refused(tree: dict) -> str:
    """Why reading this tree is refused, or ""."""
    try:
        return structure_problem(from_tree(tree))
    except PrismError as error:
        return str(error)


PATHS = [path for path in paths(full_tree()) if path not in ("format", "version")]
ARRAYS = [path for path in PATHS if isinstance(at(full_tree(), path)[0][path.split("/")[-1]], np.ndarray)]


def test_tree_and_back():
    assert differences(full_graph(), from_tree(full_tree())) == []


def test_root_holds_the_parts_in_order():
    scalars = ["format", "version", "stage", "world_size", "complete"]
    assert list(full_tree()) == scalars + list(PARTS)
    assert list(to_tree(train4())) == scalars + list(PARTS[:-6])


@pytest.mark.parametrize(
    "path", [path for path in PATHS if path not in OPTIONAL and path != "replay/timing/iteration_ns"]
)
def test_missing_field_is_named(path):
    tree = full_tree()
    folder, name = at(tree, path)
    del folder[name]
    assert f"/{path} is missing; make the file again" in refused(tree)


@pytest.mark.parametrize("path", PATHS)
def test_field_of_another_type_is_named(path):
    for wrong in (None, 1.5, np.array(["a"], object), np.zeros(3, "f4"), {}):
        tree = full_tree()
        folder, name = at(tree, path)
        folder[name] = wrong
        assert path.split("/")[0] in refused(tree)


@pytest.mark.parametrize("path", [path for path in ARRAYS if path not in FREE])
def test_field_of_another_length_is_refused(path):
    tree = full_tree()
    folder, name = at(tree, path)
    folder[name] = (
        np.concatenate([folder[name], folder[name][:1]]) if len(folder[name]) else np.zeros_like(folder[name], shape=1)
    )
    assert refused(tree)


@pytest.mark.parametrize("path", [path for path in ARRAYS if path.endswith("offset") and len(path.split("/")) > 1])
def test_offsets_out_of_range_are_refused(path):
    for position, value in ((0, 1), (0, -1), (-1, 10**9), (1, 10**9), (1, -5)):
        tree = full_tree()
        folder, name = at(tree, path)
        if "clock" in name:
            return  # a difference between clocks, not an offset into anything
        folder[name] = folder[name].copy()
        folder[name][position] = value
        assert refused(tree)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ranks/program", 1), ("ranks/values", -1), ("ranks/slots/data", 5), ("groups/members/data", 4),
        ("programs/slot", 3), ("programs/lane", 2), ("programs/kind", 4), ("programs/op", 13), ("programs/dtype", 17),
        ("programs/reduce", 10), ("programs/callsite", 10**6), ("programs/edges", -1), ("programs/peer", 2),
        ("durations/row", 4), ("durations/source", 5), ("timeline/row", -1), ("timeline/critical", 99),
        ("timing/rank", 4), ("memory/rank", -1), ("store/rank", 4), ("probes/op", 13), ("replay/timing/rank", 77),
    ],
)  # fmt: skip
def test_reference_out_of_range_is_refused(path, value):
    tree = full_tree()
    folder, name = at(tree, path)
    folder[name] = np.full_like(folder[name], value)
    assert refused(tree)


def test_world_of_nobody_and_unknown_stage_are_refused():
    for name, value in (("world_size", 0), ("world_size", 5), ("stage", "burnt")):
        assert refused(full_tree() | {name: value})


def test_environment_that_is_no_json_object_is_refused():
    for text in (b"{", b"[1]"):
        tree = full_tree()
        tree["environment"]["json"] = {"offset": np.array([0, len(text)]), "utf8": np.frombuffer(text, np.uint8)}
        assert "/environment/json is not" in refused(tree)


def test_other_byte_order_is_read():
    tree = full_tree()
    tree["programs"]["lane"] = tree["programs"]["lane"].astype(">i2")
    assert from_tree(tree).programs[0].lane.tolist() == train4().programs[0].lane.tolist()


def test_rows_of_unequal_length_are_a_mistake_of_the_writer():
    graph = full_graph()
    graph.timing.end = copy.copy(graph.timing.end)
    graph.timing.end[0] = graph.timing.end[0][:-1]
    with pytest.raises(ValueError, match="end has rows of other lengths than host_issue"):
        to_tree(graph)
