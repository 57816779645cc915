"""Rules that say what a rank receives where its peers do not run (P§5.2, "user-defined communication input"): a TOML file."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prism_tools.errors import PrismError
from prism_tools.graph.schema import DTYPES, Op

SMALL = 64 << 10  # bytes: smaller payloads steer programs, and are ruled, never invented
OPS = tuple(op.name.lower() for op in Op if op not in (Op.NONE, Op.OPTIMIZER_STEP, Op.BARRIER, Op.SEND))
# torch's functions that send pickled objects: an operation within one of them goes by both names.
OBJECT_CALLS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list",
)  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<=": int.__le__,
    ">=": int.__ge__,
    "<": int.__lt__,
    ">": int.__gt__,
    "": int.__eq__,
}
_SIZE = re.compile(r"\s*(<=|>=|<|>|)\s*(\d+)\s*([KMGT]?)B?\s*", re.IGNORECASE)
_RANGE = re.compile(r"(\d+)-(\d*)")
_CALL = re.compile(r"(self|zeros|splits-zero|constant|randint|object|from|python)\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Occasion:
    """One operation that receives something. ``calls``: its name, and that of torch's object function around it, if any;
    ``groups``: the group's description and name; ``ordinal``: its place, from 0, among the rank's operations of this kind on
    the group; ``size``: bytes that the rank contributes, or receives where it contributes nothing."""

    calls: tuple[str, ...]
    groups: tuple[str, ...]
    ordinal: int
    dtype: str
    size: int
    site: str


@dataclass(frozen=True)
class Generator:
    """What fills the results: a kind, with numbers, an object, a path, or "module:function"."""

    kind: str
    arguments: tuple[Any, ...] = ()
    text: str = "self"


SELF = Generator("self")


@dataclass
class Rule:
    """Conditions, all of which must hold, by key, and what then answers. ``line``: where the rule begins in its file."""

    line: int
    generator: Generator
    conditions: dict[str, Callable[[Occasion], bool]] = field(default_factory=dict)

    def holds(self, occasion: Occasion) -> bool:
        return all(condition(occasion) for condition in self.conditions.values())


@dataclass
class Rules:
    """The rules of one file, in order: the first that holds answers."""

    path: str
    rules: list[Rule]

    def find(self, occasion: Occasion) -> int:
        """Index of the rule that answers, or -1."""
        return next((k for k, rule in enumerate(self.rules) if rule.holds(occasion)), -1)


def may_be_invented(occasion: Occasion) -> bool:
    """Whether no rule is needed: floats, and more of them than what steers a program."""
    return occasion.size > SMALL and occasion.dtype.startswith(("float", "bfloat", "complex"))


def load(path: str) -> Rules:
    """The rules of a file. PrismError, in one line with file, line and key: unreadable, or not what rules are."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        tables = tomllib.loads(text)
    except OSError as error:
        raise PrismError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of UTF-8, or of TOML, which says where
        raise PrismError(f"{path}: is no TOML file: {error}") from error
    lines = text.splitlines()
    for key in tables:
        if key != "rule":
            raise PrismError(f"{path}: line {_line(lines, 0, key)}: {key}: is no rule; begin each with [[rule]]")
    found = tables.get("rule", [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise PrismError(f"{path}: rule: is no list of tables; begin each with [[rule]]")
    starts = [k for k, line in enumerate(lines, 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    rules = []
    for k, table in enumerate(found):
        first = starts[k] if k < len(starts) else 1
        key = ""
        try:
            conditions = {}
            for key, value in table.items():
                if key != "generate":
                    conditions[key] = _condition(key, value)
            key = "generate"
            rules.append(Rule(first, _generator(table.get("generate"), os.path.dirname(path)), conditions))
        except ValueError as error:
            raise PrismError(f"{path}: line {_line(lines, first, key)}: {key}: {error}") from None
    return Rules(path, rules)


def _line(lines: list[str], first: int, key: str) -> int:
    """The line of ``key`` from line ``first`` on; ``first`` if it is not there."""
    pattern = re.compile(rf"""\s*(\[\s*)?["']?{re.escape(key)}["']?\s*[\].=]""")
    for number in range(first + 1, len(lines) + 1):
        if pattern.match(lines[number - 1]):
            return number
        if first and re.match(r"\s*\[\[", lines[number - 1]):
            break
    return first or 1


def _condition(key: str, value: Any) -> Callable[[Occasion], bool]:
    """ValueError: no such key, or a value of the wrong kind."""
    if key == "op":
        names = _words(value, (*OPS, *OBJECT_CALLS))
        return lambda occasion: any(name in names for name in occasion.calls)
    if key == "dtype":
        names = _words(value, DTYPES)
        return lambda occasion: occasion.dtype in names
    if key == "group":
        patterns = _patterns(value)
        return lambda occasion: any(fnmatch.fnmatchcase(name, p) for name in occasion.groups for p in patterns)
    if key == "site":
        patterns = _patterns(value)
        return lambda occasion: any(fnmatch.fnmatchcase(occasion.site, p) for p in patterns)
    if key == "size":
        return _size(value)
    if key == "ordinal":
        return _ordinal(value)
    raise ValueError("is no key of a rule; keys are op, group, ordinal, dtype, size, site, generate")


def _words(value: Any, known: tuple[str, ...]) -> list[str]:
    words = value if isinstance(value, list) else [value]
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
    return words


def _patterns(value: Any) -> list[str]:
    patterns = value if isinstance(value, list) else [value]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{pattern!r} is no text; * and ? stand for any")
    return patterns


def _size(value: Any) -> Callable[[Occasion], bool]:
    parts = _SIZE.fullmatch(str(value))
    if parts is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is no size such as 8, '<=64K' or '>1M'")
    limit = int(parts[2]) * 1024 ** " KMGT".index(parts[3].upper() or " ")
    compare = _COMPARE[parts[1]]
    return lambda occasion: compare(occasion.size, limit)


def _ordinal(value: Any) -> Callable[[Occasion], bool]:
    if isinstance(value, str) and (parts := _RANGE.fullmatch(value)):
        first, last = int(parts[1]), int(parts[2]) if parts[2] else None
        return lambda occasion: first <= occasion.ordinal and (last is None or occasion.ordinal <= last)
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{value!r} is no place such as 0, [0, 2], '2-5' or '2-'")
    return lambda occasion: occasion.ordinal in numbers


def _generator(value: Any, folder: str) -> Generator:
    """ValueError: what ``generate`` says is no generator. Files are looked for beside the rules, in ``folder``."""
    if value is None:
        raise ValueError("is missing; say what answers, such as generate = 'self'")
    parts = _CALL.fullmatch(value.strip()) if isinstance(value, str) else None
    if parts is None:
        raise ValueError(
            f"{value!r} is none of self, zeros, splits-zero, constant(V), randint(LOW, HIGH), object(LITERAL), "
            "from FILE, python:MODULE:FUNCTION"
        )
    kind, rest = parts[1], parts[2]
    if kind == "from":
        file = os.path.abspath(os.path.join(folder, rest))
        if not rest.endswith(".npy") or not os.path.isfile(file):
            raise ValueError(f"{rest!r} is no .npy file beside the rules")
        return Generator(kind, (file,), value)
    if kind == "python":
        names = rest.split(":")
        if len(names) != 3 or names[0] or not all(names[1:]):
            raise ValueError(f"{value!r} is not python:MODULE:FUNCTION")
        return Generator(kind, (names[1], names[2], os.path.abspath(folder)), value)
    arguments = _literals(rest)
    wanted = {"constant": 1, "randint": 2, "object": 1}.get(kind, 0)
    if len(arguments) != wanted:
        raise ValueError(f"{kind} takes {wanted or 'no'} value{'s' if wanted != 1 else ''}, not {len(arguments)}")
    if kind == "constant" and not isinstance(arguments[0], (int, float)):
        raise ValueError(f"{arguments[0]!r} is no number")
    if kind == "randint" and not (all(type(a) is int for a in arguments) and arguments[0] < arguments[1]):
        raise ValueError(f"{value!r} is no range of whole numbers: LOW is drawn, HIGH is not")
    return Generator(kind, arguments, value)


def _literals(text: str) -> tuple[Any, ...]:
    """The values in "(1, 2)"; () where there is nothing."""
    if not text:
        return ()
    if not (text.startswith("(") and text.endswith(")")):
        raise ValueError(f"{text!r} stands where values in parentheses should")
    try:
        return tuple(ast.literal_eval(f"({text[1:-1]},)")) if text[1:-1].strip() else ()
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{text} holds more than plain values") from None
