"""Selectors: which nodes "op=all_reduce group=dp rank=0-3" means.

Words of KEY=VALUES, all of which must hold; VALUES is a comma list, of which one must. A value that is nowhere in the file
is an error: it is a slip, and what it was meant to change would stay as it is. A word of numbers alone is a list of ranks.
Names are shell patterns. Without ``kind`` a selector means communication where it says ``op``, ``group`` or ``at``, all but
marks where it says ``lane``, and compute spans else.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.model import Graph
from prism_tools.graph.names import op_text, ranks_text, sites_of
from prism_tools.graph.schema import Kind

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches

KEYS = ("op", "group", "lane", "rank", "at", "kind", "iteration")
SHOWN = 8  # values named in an error


@dataclass(frozen=True)
class Selector:
    """``terms``: key → values: ranges of numbers for rank and iteration, else patterns. ``text``: as it was written."""

    text: str
    terms: dict[str, list]


def parse_selector(text: str) -> Selector:
    """The selector that ``text`` says; ValueError with what is wrong."""
    terms: dict[str, list] = {}
    for word in shlex.split(text):
        key, equals, values = word.partition("=")
        if not equals and re.fullmatch(r"[\d,-]+", word):
            key, values = "rank", word
        if key not in KEYS or not values:
            raise ValueError(f"{word!r} is no {'=…, '.join(KEYS[:-1])}=… or {KEYS[-1]}=…")
        if "" in values.split(","):
            raise ValueError(f"{word!r} has an empty value")
        if key in terms:
            raise ValueError(f"{key} is given twice; write {key}=A,B")
        terms[key] = _numbers(values) if key in ("rank", "iteration") else values.split(",")
    if not terms:
        raise ValueError("nothing is selected")
    if wrong := [name for name in terms.get("kind", ()) if name.upper() not in Kind.__members__]:
        raise ValueError(f"no kind {wrong[0]!r}; there are {', '.join(kind.name.lower() for kind in Kind)}")
    return Selector(text, terms)


def _numbers(text: str) -> list[range]:
    found: list[range] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} is no list of numbers such as 0-3,8")
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def told_apart(graph: Graph, selector: Selector) -> list[np.ndarray]:
    """int64[W] columns, equal where each value of the selector says the same of ranks, and of their groups."""
    rank, names = np.arange(graph.world_size), _group_names(graph) if "group" in selector.terms else {}
    columns = [(rank >= value.start) & (rank < value.stop) for value in selector.terms.get("rank", ())]
    for value in selector.terms.get("group", ()):
        columns.append(by_slots(graph, [_match(names[group], value) for group in names]))
    return columns


def by_slots(graph: Graph, groups: list[bool]) -> np.ndarray:
    """int64[W]: equal for ranks that have the chosen of ``groups`` in the same slots."""
    chosen = np.array(groups, bool)
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(chosen[slots].tobytes(), len(known)) for slots in graph.ranks.slots], np.int64)


def _group_names(graph: Graph) -> dict[int, list[str]]:
    pairs = zip(graph.groups.name, graph.groups.desc, strict=True)
    return {k: [desc.removeprefix("mesh_") or name, name, desc] for k, (name, desc) in enumerate(pairs)}


class Nodes:
    """All nodes of a graph by flat index, as selectors see them. Where ranks of a class are taken together, selectors must
    not tell them apart."""

    def __init__(self, graph: Graph, matches: Matches) -> None:
        self.graph = graph
        self._matches = matches
        lowest = matches.classes.lowest
        columns = ("kind", "op", "lane", "segment")
        empty = np.empty(0, np.int64)
        self._column = {
            name: np.concatenate([empty, *(graph.program_of(rank).columns[name] for rank in lowest)])
            for name in columns
        }
        self.kind, self.lane, self.segment = (self._column[name] for name in ("kind", "lane", "segment"))
        self._column["rank"] = self.rank = np.repeat(lowest, np.diff(matches.base))
        sites = [sites_of(program) for program in graph.programs]
        self._column["callsite"] = np.concatenate([empty, *(sites[p] for p in graph.ranks.program[lowest])])
        self._column["group"] = np.full(len(self.rank), -1)
        met = np.flatnonzero(matches.of_node >= 0)
        self._column["group"][met] = matches.group[matches.of_node[met]]

    def select(self, selector: Selector) -> np.ndarray:
        """bool per flat node; all members of a match that has one selected member. PrismError if there is none, or a value
        holds for nothing in the file."""
        chosen = self._of_kind(selector.terms)
        for key, values in selector.terms.items():
            holds = np.zeros(len(chosen), bool)
            for value in values:
                here = self._holds(key, value)
                if not here.any():
                    which = "" if len(values) == 1 else f" with {_value_text(value)}"
                    raise PrismError(f"{selector.text!r} selects nothing{which}: {self._there_is(key)}")
                holds |= here
            chosen &= holds
        if not chosen.any():
            raise PrismError(
                f"{selector.text!r} selects nothing: no node is all of this at once; see prism-inspect nodes"
            )
        return self.with_matches(chosen)

    def with_matches(self, chosen: np.ndarray) -> np.ndarray:
        """``chosen`` and all members of the matches that have a chosen one: they take the same time."""
        hit = np.zeros(len(self._matches) + 1, bool)
        hit[self._matches.of_node[chosen]] = True
        hit[-1] = False  # of nodes without a match
        return chosen | hit[self._matches.of_node]

    def _of_kind(self, terms: dict[str, list]) -> np.ndarray:
        if "kind" in terms:
            return np.ones(len(self.kind), bool)
        if terms.keys() & {"op", "group", "at"}:
            return self.kind == Kind.COMM
        return self.kind != Kind.MARK if "lane" in terms else self.kind == Kind.COMPUTE

    def _holds(self, key: str, value: range | str) -> np.ndarray:
        """bool per flat node; nothing, if some of a range's numbers are none of the file's."""
        if isinstance(value, range):
            count = self.graph.world_size if key == "rank" else self.graph.iterations()
            numbers = self.rank if key == "rank" else self.segment
            return (numbers >= value.start) & (numbers < value.stop) & (value.stop <= count)
        column = self._column["callsite" if key == "at" else key]
        return np.isin(column, [number for number, names in self._names(key).items() if _match(names, value)])

    def _names(self, key: str) -> dict[int, list[str]]:
        """Number in the column → what it is called, the name to show first."""
        graph = self.graph
        if key == "kind":
            return {kind: [Kind(kind).name.lower()] for kind in np.unique(self.kind).tolist()}
        if key == "op":
            return {op: [op_text(op)] for op in np.unique(self._column["op"][self.kind == Kind.COMM]).tolist()}
        if key == "lane":
            return {k: [name] for k, name in enumerate(graph.lanes)}
        if key == "group":
            return _group_names(graph)
        sites = np.unique(self._column["callsite"])
        return {k: _site_names(graph.strings[k]) for k in sites[sites >= 0].tolist()}

    def _there_is(self, key: str) -> str:
        """What the file has for ``key``."""
        graph = self.graph
        if key in ("rank", "iteration"):
            count = graph.world_size if key == "rank" else graph.iterations()
            return f"the file has {key}s {ranks_text(range(count))}"
        shown = sorted({names[0] for names in self._names(key).values()})
        more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
        what = "call sites" if key == "at" else f"{key}s"
        return f"the file has {what} {', '.join(shown[:SHOWN]) or 'none'}{more}"


def _value_text(value: range | str) -> str:
    return value if isinstance(value, str) else ranks_text((value.start, value.stop - 1)).replace(",", "-")


def _site_names(site: str) -> list[str]:
    """ "models/gpt.py:41 step" whole, and by its parts: line and file, with and without folders, and function."""
    line, _, function = site.rpartition(" ") if " " in site else (site, "", "")  # files' names may have blanks
    places = [line, line.rpartition(":")[0]]
    return [site, *places, *(place.rpartition("/")[2] for place in places), function]


def _match(names: list[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names if name)
