"""Partial re-alignment (P§9): what was measured anew replaces what was known, as long as the program is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prism_tools.calibrate.durations import durations
from prism_tools.calibrate.entries import Entries
from prism_tools.calibrate.measured import read_rows
from prism_tools.calibrate.planning import FIELDS, Gain, Planner, packed
from prism_tools.calibrate.probes import keys_of
from prism_tools.errors import PrismError
from prism_tools.graph.check import refuse_backwards
from prism_tools.graph.equations import flat
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Graph, Memory, Probes, Timing
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.schema import P2P, Kind, Op, Source

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches

SAME = ("kind", "op", "peer", "root", "dtype", "reduce", "batch", "segment")  # where the two programs must agree
PROBED = ("op", "dtype", "reduce", "size", "bytes")


def realign(graph: Graph, new: Graph, name: str) -> tuple[Graph, Gain]:
    """Calibrated ``graph`` with what ``new``, another graph of the same program called ``name``, measured; and the gain.

    A rank's own spans are new if it, or the rank that stands in for it, was measured anew. A match is new if all its
    members were and the result is real, or if it was probed anew; a lesser source never replaces a better one. What is not
    new keeps its duration and source. PrismError: not calibrated yet, another program, or nothing measured.
    """
    if graph.durations is None or graph.stage in ("bare", "sliced"):
        raise PrismError("not calibrated yet, so there is nothing to re-align; run prism-calibrate first")
    _check_same(graph, new, name)
    if new.timing is None or not len(new.timing.rank):
        raise PrismError(f"{name}: nothing was measured; run prism-slice first")
    refuse_backwards(new, name)
    joined = replace(graph, timing=_timing(graph.timing, new.timing), probes=_probes(graph.probes, new.probes))
    planner = Planner(graph)
    matches = planner.matches
    _check_met(graph, matches, new, name)
    fresh = durations(joined, matches)
    anew = _anew(joined, matches, set(new.timing.rank.tolist()), new.probes, graph, fresh.source, fresh.row)
    columns = [
        np.where(
            anew, flat(getattr(fresh, field), fresh.row), flat(getattr(graph.durations, field), graph.durations.row)
        )
        for field in FIELDS
    ]
    ranks = ranks_text(new.timing.rank.tolist())
    planner.step(f"ranks {ranks} measured anew in {name}", packed(matches.base, *columns), anew)
    solved, gain = planner.result()
    return replace(solved, timing=joined.timing, probes=joined.probes, memory=_memory(graph.memory, new.memory)), gain


def _anew(
    joined: Graph, matches: Matches, ranks: set[int], probes: Probes | None, old: Graph, source: list, row: np.ndarray
) -> np.ndarray:
    """bool per flat node: whether its duration was measured anew."""
    assert old.durations is not None
    stand_in = read_rows(joined).stand_in
    of_rank = np.isin(stand_in, list(ranks))
    anew = np.repeat(of_rank, np.diff(matches.base))
    now, before = flat(source, row), flat(old.durations.source, old.durations.row)
    probed = set(zip(*(_keys(probes)), strict=True)) if probes is not None else set()
    entries = Entries(joined, matches)
    keys, key = keys_of(joined, matches, entries, np.arange(len(matches)))
    first = matches.members.data[entries.first]
    kind, known = now[first], before[first]
    found = np.array([tuple(getattr(k, name) for name in PROBED) in probed for k in keys], bool)[key]
    all_new = np.logical_and.reduceat(of_rank[entries.rank], entries.first) if len(matches) else found
    real = all_new & ((kind == Source.REAL) | (known == kind))
    fresh = np.where(kind == Source.PROBE, found & (known != Source.REAL), real)
    anew[entries.flat] = fresh[entries.match]
    return anew


def _keys(probes: Probes) -> list[list[int]]:
    columns = [getattr(probes, name).tolist() for name in PROBED]
    columns[0] = [int(Op.SEND) if op in P2P else op for op in columns[0]]
    return columns


def _timing(old: Timing | None, new: Timing) -> Timing:
    """The rows of ``new``, and those of ``old`` of other ranks, whose slices keep their numbers."""
    if old is None:
        return new
    kept = np.flatnonzero(~np.isin(old.rank, new.rank))
    shifted = replace(new, slice=new.slice + np.int32(old.slice.max(initial=-1) + 1))
    return _joined(old, kept, shifted)


def _probes(old: Probes | None, new: Probes | None) -> Probes | None:
    """The rows of both; of what both have, those of ``new``."""
    if old is None or new is None:
        return new or old
    known = set(zip(*_keys(new), strict=True))
    kept = [k for k, key in enumerate(zip(*_keys(old), strict=True)) if key not in known]
    return _joined(old, np.array(kept, np.int64), new)


def _memory(old: Memory | None, new: Memory | None) -> Memory | None:
    """The rows of both; of a rank's peaks in one stage, that of ``new``."""
    if old is None or new is None:
        return new or old
    anew = set(zip(new.rank.tolist(), new.stage, strict=True))
    kept = [k for k, key in enumerate(zip(old.rank.tolist(), old.stage, strict=True)) if key not in anew]
    return _joined(old, np.array(kept, np.int64), new)


def _joined(old: Any, kept: np.ndarray, new: Any) -> Any:
    """The ``kept`` rows of ``old`` and all of ``new``; an optional column (iteration_ns) only if both have it."""
    columns: dict[str, Any] = {}
    for field in type(old).__dataclass_fields__:
        a, b = getattr(old, field), getattr(new, field)
        if isinstance(a, list):
            columns[field] = [a[k] for k in kept] + b if len(a) and len(b) else []
        else:
            columns[field] = np.concatenate([a[kept], b])
    return type(old)(**columns)


def _check_same(graph: Graph, new: Graph, name: str) -> None:
    """PrismError naming the first rank, operation and line where ``new`` does something else. Call sites and names of
    groups may differ: the program was edited."""
    if graph.world_size != new.world_size:
        raise PrismError(f"{name}: a program of {new.world_size} ranks, not {graph.world_size}; record it with as many")
    known: dict[tuple[int, ...], int] = {}  # thousands of ranks may have values of their own, but share a program
    for rank in range(graph.world_size):
        programs = tuple(int(g.ranks.program[rank]) for g in (graph, new))
        key = (*programs, *(int(g.ranks.values[rank]) for g in (graph, new)))
        if programs not in known:
            known[programs] = _first_difference(graph, new, rank)
        if key not in known:
            known[key] = _other_bytes(graph, new, rank)
        found = [known[each] for each in (programs, key) if known[each] >= 0]
        node = min(found) if found else _other_group(graph, new, rank)
        if node >= 0:
            raise _differs(graph, rank, node, name, _what(new, rank, node), _what(graph, rank, node))


def _check_met(graph: Graph, matches: Matches, new: Graph, name: str) -> None:
    """PrismError naming the first operation that has other counterparts in ``new``: tags may say so."""
    try:
        others = find_matches(new)
    except PrismError as error:
        raise PrismError(f"{name}: {error}") from None
    met = np.flatnonzero(matches.of_node >= 0)  # these are all that communicate, in both
    first = [each.members.data[each.members.offset[each.of_node[met]]] for each in (matches, others)]
    for flat_node in met[first[0] != first[1]][:1].tolist():
        texts = []
        for each in (others, matches):
            them = [member for member in each.members[each.of_node[flat_node]].tolist() if member != flat_node]
            texts.append(f"it meets {', '.join(_place_text(graph, matches, member) for member in them)}")
        raise _differs(graph, matches.rank_of(flat_node), matches.node_of(flat_node), name, *texts)


def _place_text(graph: Graph, matches: Matches, flat_node: int) -> str:
    rank, node = matches.rank_of(flat_node), matches.node_of(flat_node)
    return f"rank {rank}'s operation {_number(graph, rank, node)}"


def _number(graph: Graph, rank: int, node: int) -> int:
    """How many operations of ``rank`` come before ``node``."""
    return int(np.count_nonzero(graph.program_of(rank).kind[:node] == Kind.COMM))


def _differs(graph: Graph, rank: int, node: int, name: str, there: str, here: str) -> PrismError:
    where = f"{name}: another program: rank {rank} differs at operation {_number(graph, rank, node)}"
    return PrismError(f"{where}: {there} there, {here} here; record and slice it from the beginning")


def _first_difference(graph: Graph, new: Graph, rank: int) -> int:
    """The first node of ``rank`` that is not the same, whatever its bytes, -1 if all are."""
    a, b = graph.program_of(rank), new.program_of(rank)
    length = min(len(a), len(b))
    differ = np.zeros(length, bool)
    for column in SAME:
        differ |= a.columns[column][:length] != b.columns[column][:length]
    differ |= np.array(graph.lanes)[a.lane[:length]] != np.array(new.lanes)[b.lane[:length]]
    if differ.any():
        return int(np.argmax(differ))
    if len(a) != len(b):
        return length
    here, there = ({tuple(edge) for edge in program.edges.tolist()} for program in (a, b))
    return min((max(edge) for edge in here ^ there), default=-1)


def _other_bytes(graph: Graph, new: Graph, rank: int) -> int:
    """The first node of ``rank`` that has other bytes in ``new``, -1 if there is none."""
    here, there = graph.values_of(rank).bytes, new.values_of(rank).bytes
    length = min(len(here), len(there))
    return int(next(iter(np.flatnonzero(here[:length] != there[:length])), -1))


def _other_group(graph: Graph, new: Graph, rank: int) -> int:
    """The first node of ``rank`` whose group has other members or another backend in ``new``, -1 if there is none."""
    met = np.flatnonzero(graph.program_of(rank).kind == Kind.COMM)
    slots = np.stack([g.program_of(rank).slot[met] for g in (graph, new)], 1)
    for node in np.sort(met[np.unique(slots, axis=0, return_index=True)[1]]).tolist():  # where each pair first occurs
        pair = [(g, int(g.ranks.slots[rank][g.program_of(rank).slot[node]])) for g in (graph, new)]
        described = [(g.groups.members[number].tolist(), g.groups.backend[number]) for g, number in pair]
        if described[0] != described[1]:
            return node
    return -1


def _what(graph: Graph, rank: int, node: int) -> str:
    """ "all_reduce 4,096 B on gloo 0-1 (gpt.py:77 forward)": the node, or the communication after a span."""
    program = graph.program_of(rank)
    ahead = np.flatnonzero(program.kind[node:] != Kind.COMPUTE)
    if not len(ahead):
        return "the end"
    node += int(ahead[0])
    kind, site = Kind(int(program.kind[node])), callsite_text(graph, rank, node)
    text = kind.name.lower() if kind == Kind.WAIT else op_text(int(program.op[node]))
    if kind == Kind.COMM:
        group = int(graph.ranks.slots[rank][program.slot[node]])
        members = graph.groups.members[group].tolist()
        where = ranks_text(members) if members == sorted(members) else ",".join(map(str, members))
        text += f" {int(graph.values_of(rank).bytes[node]):,} B on {graph.groups.backend[group]} {where}"
    return f"{text} ({site})" if site else text
