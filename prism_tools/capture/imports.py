"""What the program imports from installed packages, imported once before ranks are forked: its memory is theirs together."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FILES = 200  # of the program's own that are looked into


def modules_of(command: list[str], cwd: str) -> list[str]:
    """Names of installed modules that the program (script and arguments, or -m module) imports whenever it runs, in order.

    Only statements at the top of the program's files, which are read, not run; those of torch and of Python are left out.
    """
    own = cwd if command[0] == "-m" else os.path.dirname(os.path.join(cwd, command[0]))
    start = _in_folder(own, command[1]) if command[0] == "-m" else os.path.join(cwd, command[0])
    ahead: list[str | None] = [start]
    seen: set[str] = set()
    found: dict[str, None] = {}
    while ahead and len(seen) < FILES:
        path = ahead.pop(0)
        if path is None or path in seen:
            continue
        seen.add(path)
        for name, member in _imports(path):
            local = _in_folder(own, name)
            if local is not None:
                ahead += [local, _in_folder(own, f"{name}.{member}")]
            elif _is_installed(name.partition(".")[0], own):
                found[name] = None
                if member:
                    found[f"{name}.{member}"] = None  # a module, or a name in one: trying tells
    return list(found)


def load(names: Sequence[str]) -> None:
    """Import the modules, but none from the first on that starts threads, which forked ranks would not have."""
    if names:
        for name in names[: _harmless(names)]:
            _load(name)


def _harmless(names: Sequence[str]) -> int:
    """How many of the modules a process can import, in this order, and still be of one thread: a child tries."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        try:
            _try(names, there)
        finally:
            os._exit(0)  # whatever happens: what follows is the parent's
    os.close(there)
    try:
        with open(here) as told:
            counts = told.read().split()
    finally:
        os.kill(child, signal.SIGKILL)  # it has closed its pipe, or we are interrupted
        os.waitpid(child, 0)
    return int(counts[-1]) if counts else 0


def _try(names: Sequence[str], there: int) -> None:
    """Import the modules in silence; tell after each how many there are, until one has started a thread."""
    before = len(os.listdir("/proc/self/task"))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for count, name in enumerate(names, 1):
        _load(name)
        if len(os.listdir("/proc/self/task")) > before:
            return
        os.write(there, b"%d\n" % count)


def _load(name: str) -> None:
    parent, _, member = name.rpartition(".")
    if parent in sys.modules and hasattr(sys.modules[parent], member):
        return
    with contextlib.suppress(Exception, SystemExit):  # the ranks will say what is wrong
        importlib.import_module(name)


def _imports(path: str) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") of the imports at the top of a file."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for statement in _top(tree.body):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield from ((statement.module, "" if alias.name == "*" else alias.name) for alias in statement.names)


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.Try):
            yield from _top(statement.body)


def _in_folder(folder: str, name: str) -> str | None:
    """The file of a module of the program's own."""
    base = os.path.join(folder, *name.split("."))
    for path in (f"{base}.py", os.path.join(base, "__main__.py"), os.path.join(base, "__init__.py")):
        if os.path.isfile(path):
            return path
    return None


def _is_installed(top: str, own: str) -> bool:
    if top in sys.stdlib_module_names or top in ("torch", "prism_tools", "__future__"):
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or ()) + ([spec.origin] if spec.origin else [])
    return not any(os.path.abspath(place).startswith(os.path.abspath(own) + os.sep) for place in places)
