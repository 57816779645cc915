"""The format's description names every number and field that the code knows."""

from pathlib import Path

from prism_tools.graph.results import RESULTS
from prism_tools.graph.schema import DTYPES, NODE_COLUMNS, STAGES, VALUE_COLUMNS, VERSION, Kind, Op, Reduce, Source
from prism_tools.graph.tree import PARTS, to_tree
from tests.graph.builder import add_results, train4

TEXT = Path(__file__).parents[2].joinpath("share/doc/prism/format.md").read_text()
WORDS = " ".join(TEXT.split())


def test_version_stages_and_groups_are_described():
    assert TEXT.startswith(f"# PrismTrace, version {VERSION}\n")
    assert all(f"`{stage}`" in TEXT for stage in STAGES)
    assert all(f"/{part}" in TEXT for part in (*PARTS, *RESULTS))


def test_every_field_is_described():
    graph = train4()
    add_results(graph)

    def names(tree: dict) -> set[str]:
        return {name for name in tree} | {n for value in tree.values() if isinstance(value, dict) for n in names(value)}

    assert sorted(name for name in names(to_tree(graph)) if f"`{name}`" not in TEXT and f"/{name}" not in TEXT) == []


def test_columns_have_their_types():
    assert all(f"| `{name}` | {dtype} |" in TEXT for name, dtype in NODE_COLUMNS.items())
    assert all(f"`{name}` {dtype}" in TEXT for name, dtype in VALUE_COLUMNS.items())


def test_numbers_are_the_schema_s():
    assert ", ".join(DTYPES) in WORDS
    assert ", ".join(f"{kind.value} {kind.name}" for kind in Kind) in TEXT
    assert all(f"{op.value} {op.name.lower()}" in TEXT for op in Op if op != Op.OPTIMIZER_STEP)
    assert ", ".join(f"{reduce.value} {reduce.name.lower()}" for reduce in Reduce) in TEXT
    assert ", ".join(f"{source.value} {source.name.lower()}" for source in Source) in TEXT
