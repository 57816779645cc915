"""The shape of the code: import direction, owners of libraries, lengths, scripts."""

import ast
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "prism_tools"

# Which other parts each part may import; the version in prism_tools/__init__.py is everybody's.
LOW = {"errors", "graph"}
LEAVES = {"launch", "gpu"}
MAY_IMPORT = {
    "__init__": set(),
    "errors": set(),
    "graph": {"errors"},
    "tensors": LOW,
    "capture": LOW | LEAVES | {"tensors"},
    "record": LOW | LEAVES | {"tensors", "capture"},
    "emulate": LOW | LEAVES | {"tensors", "capture"},
    "slicing": LOW | LEAVES | {"tensors", "capture", "record", "emulate", "calibrate"},
    "calibrate": LOW,
    "analyze": LOW,
    "launch": {"errors"},
    "gpu": {"errors"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT) - {"__init__"}
OWNER = {
    "h5py": {"graph/file.py"},
    "numba": {"graph/compiled.py"},
    "llvmlite": {"graph/compiled.py"},
    "matplotlib": {"analyze/timeline.py"},
    "submitit": {"launch/submit.py"},
}


def sources(folder=PACKAGE):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path):
    """Dotted names that ``path`` imports, at any depth; "from a import b" counts as a.b."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def part(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_import_direction():
    wrong = []
    for path in sources():
        for name in imports(path):
            if name.startswith("prism_tools.") and name != "prism_tools.__version__":
                target = name.split(".")[1]
                if target not in MAY_IMPORT[part(path)] | {part(path)}:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("library", OWNER)
def test_one_owner(library):
    users = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if any(name.split(".")[0] == library for name in imports(path))
    }
    assert users <= OWNER[library]


def test_file_lengths():
    lengths = {path: len(path.read_text().splitlines()) for path in sources() + sources(ROOT / "tests")}
    limit = {path: 600 if (ROOT / "tests") in path.parents else 400 for path in lengths}
    assert {str(path): n for path, n in lengths.items() if n > limit[path]} == {}


def test_function_lengths():
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > 50:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert long == []


def test_scripts_are_three_lines():
    scripts = sorted((ROOT / "bin").iterdir())
    assert [path.name for path in scripts] == [
        f"prism-{tool}" for tool in ("calibrate", "inspect", "record", "replay", "slice")
    ]
    for path in scripts:
        tool = path.name.removeprefix("prism-")
        assert path.read_text() == (
            f"#!/usr/bin/env python3\nfrom prism_tools.cli.{tool} import main\nraise SystemExit(main())\n"
        )
        assert os.access(path, os.X_OK)


def test_no_utils():
    assert [path for path in sources() if path.stem in ("utils", "util", "helpers", "misc")] == []
