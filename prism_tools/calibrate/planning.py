"""Planning (P§9): what would an iteration take if some durations were others?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.durations import from_measurements
from prism_tools.calibrate.schedule import timeline
from prism_tools.calibrate.selectors import Nodes, Selector, by_slots, told_apart
from prism_tools.calibrate.steady import borrowed, steady_state
from prism_tools.errors import PrismError
from prism_tools.graph.alike import meetings
from prism_tools.graph.check import refuse_backwards
from prism_tools.graph.classes import classes_of, everybody
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations, Graph, Timeline
from prism_tools.graph.names import ranks_text
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import UNKNOWN, Kind, Source
from prism_tools.graph.semantics import computing_lanes

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches

FIELDS = ("own", "tail", "spread", "bias", "source")
MOST = 1e18  # ns that all durations may add up to: so long are sums, and cycles of the steady state, within int64


@dataclass(frozen=True)
class Change:
    """``how``: "scale" (factor), "set" or "delay" (ns) what ``selector`` says, or "ideal" with ``amount`` "comm" or
    "balance". ``text``: as it was written."""

    how: str
    selector: Selector | None
    amount: float | int | str
    text: str


@dataclass
class Gain:
    """Iteration time in ns (of a graph without iterations: of the whole run) before and after, and the half-width of the
    difference, NaN where nothing is known of it. ``parts``: of each step its text, what it added, how many nodes it
    changed and in how many of the ``counted`` iterations some of them are on the critical path, before or after.
    ``lasting``: where these also show how slow the warm-up was: the cycle times before and after, [] if there are none."""

    before: int
    after: int
    half: float
    parts: list[tuple[str, int, int, int]]
    counted: int
    lasting: list[float] | None = None


class Planner:
    """A graph, solved again and again with other durations."""

    def __init__(self, graph: Graph, apart: Sequence[np.ndarray] | None = None) -> None:
        """The durations of a calibrated graph are its own, those of any other come from its measurements, if it has any.

        ``apart``: int[W] columns; ranks that are equal in each and take equally long are solved as one, and must stay
        so. None: every rank by itself.
        """
        self.graph = graph
        known, solved = graph.durations, graph.timeline
        if graph.stage in ("bare", "sliced") or known is None or solved is None:
            refuse_backwards(graph)
            known, solved = from_measurements(graph) if graph.timing or not known else known, None
        classes = everybody(graph) if apart is None else classes_of(graph, known.row, *apart)
        self.matches = find_matches(graph, classes=classes)
        self._order = dependency_order(graph, self.matches)
        solved = solved or timeline(graph, self.matches, self._order, known)
        self.durations: Durations = known
        self._first, self._solved = (known, solved), solved
        self._parts: list[tuple[str, int, int, int]] = []

    def step(self, text: str, changed: Durations, nodes: np.ndarray) -> None:
        """Solve with ``changed``, which differs from before in ``nodes`` (bool per flat node)."""
        solved = timeline(self.graph, self.matches, self._order, changed)
        segments = set(counted(self.graph))
        touched: set[int] = set()
        for path in (self._solved.critical, solved.critical):
            hit = path[nodes[self.matches.flat(*path.T)]]
            touched |= {int(self.graph.program_of(rank).segment[node]) for rank, node in hit.tolist()}
        ranks = np.bincount(self.matches.classes.of_rank, minlength=len(self.matches.classes))
        count = int(np.diff(np.append(0, np.cumsum(nodes))[self.matches.base]) @ ranks)
        self._parts.append((text, _length(solved) - _length(self._solved), count, len(touched & segments)))
        self.durations, self._solved = changed, solved

    def result(self) -> tuple[Graph, Gain]:
        """The calibrated graph as it is after the steps, and what they gained."""
        steady = steady_state(self.graph, self.matches, self._order, self.durations)
        solved, (known, first) = self._solved, self._first
        graph = replace(self.graph, stage="calibrated", durations=self.durations, timeline=solved, steady=steady)
        graph.replay = None  # it was one of the graph before
        half = _half(self.graph, self.matches, (known, first), (self.durations, solved))
        gain = Gain(_length(first), _length(solved), half, self._parts, len(first.iteration_ns))
        earlier = self.graph.steady if first is self.graph.timeline else None
        earlier = earlier or steady_state(self.graph, self.matches, self._order, known)
        if borrowed(first, earlier) or borrowed(solved, steady) or self._odd(gain.after - gain.before):
            gain.lasting = [s.total_ns / s.iterations for s in (earlier, steady) if s and not s.problem]
        return graph, gain

    def _odd(self, more: int) -> bool:
        """Whether iterations that take ``more`` ns do so although nothing takes longer, or less although nothing is shorter."""
        totals = []
        for each in (self._first[0], self.durations):
            row = each.row[self.matches.classes.lowest]
            totals.append(flat(each.own, row) + flat(each.tail, row))
        change = totals[1] - totals[0]
        return more > 0 and not (change > 0).any() or more < 0 and not (change < 0).any()


def plan(graph: Graph, changes: Sequence[Change], real: Collection[int] = ()) -> tuple[Graph, Gain]:
    """``graph`` calibrated with ``changes`` made one after the other, and what they gain.

    ``real``: ranks that run for real in a replay: their own spans and what they do among themselves stay as they are.
    PrismError: a selector that selects nothing that can be changed.
    """
    selectors = [change.selector for change in changes if change.selector is not None]
    apart = [column for selector in selectors for column in told_apart(graph, selector)]
    within = [bool(real) and set(members.tolist()) <= set(real) for members in graph.groups.members]
    apart += [np.isin(np.arange(graph.world_size), list(real)), by_slots(graph, within)]
    planner = Planner(graph, apart)
    nodes = Nodes(graph, planner.matches)
    fixed = _fixed(planner.matches, nodes, real, within)
    for change in changes:
        chosen = _chosen(nodes, change)
        if chosen.any() and not (chosen & ~fixed).any():
            raise PrismError(
                f"{change.text}: ranks {ranks_text(real)} run for real in this replay; select virtual ranks"
            )
        chosen &= ~fixed
        planner.step(change.text, _changed(graph, planner.matches, nodes, planner.durations, change, chosen), chosen)
    return planner.result()


def _fixed(matches: Matches, nodes: Nodes, real: Collection[int], within: list[bool]) -> np.ndarray:
    mine = np.isin(nodes.rank, list(real))
    met = np.flatnonzero(mine & (matches.of_node >= 0))
    mine[met] = np.array(within, bool)[matches.group[matches.of_node[met]]]
    return mine


def _chosen(nodes: Nodes, change: Change) -> np.ndarray:
    if change.selector is None:
        return (nodes.kind == Kind.COMM) if change.amount == "comm" else (nodes.kind != Kind.COMM)
    chosen = nodes.select(change.selector)
    if change.how == "delay" and change.selector.terms.keys() <= {"rank", "iteration"}:
        chosen = _first_spans(nodes, chosen)
        if not chosen.any():
            raise PrismError(
                f"{change.text}: no compute span in an iteration of these ranks; select what to delay by kind=…"
            )
    return chosen


def _first_spans(nodes: Nodes, chosen: np.ndarray) -> np.ndarray:
    """The first of the ``chosen`` compute spans of each rank and iteration (without iterations: of the rank), on the lane
    where the rank computes."""
    graph = nodes.graph
    lane = [computing_lanes(graph.lanes, program.lane)[0] for program in graph.programs]
    on_lane = nodes.lane == np.array(lane)[graph.ranks.program[nodes.rank]]
    inside = nodes.segment >= 0 if graph.iterations() else np.ones(len(chosen), bool)
    able = np.flatnonzero(chosen & on_lane & inside)
    key = nodes.rank[able] * (int(nodes.segment.max(initial=0)) + 1) + nodes.segment[able]
    first = np.zeros(len(chosen), bool)
    first[able[np.unique(key, return_index=True)[1]]] = True
    return first


def _changed(
    graph: Graph, matches: Matches, nodes: Nodes, known: Durations, change: Change, chosen: np.ndarray
) -> Durations:
    """``known`` with ``change`` made to the ``chosen`` nodes, whose source is PLANNED from then on."""
    row = known.row[matches.classes.lowest]
    own, tail, spread, bias, source = (flat(getattr(known, name), row).copy() for name in FIELDS)
    count = np.bincount(matches.classes.of_rank, minlength=len(matches.classes))
    if change.how == "scale":
        for column in (own, tail, spread, bias):
            column[chosen] = np.minimum(np.rint(column[chosen] * float(change.amount)), 2 * MOST)
    elif change.how == "delay":
        own[chosen] += int(change.amount)
    elif change.how == "set" or change.amount == "comm":
        own[chosen] = int(change.amount if change.how == "set" else 0)
        tail[chosen] = spread[chosen] = bias[chosen] = 0
    else:
        for number, program in enumerate(graph.programs):
            mine = np.flatnonzero(graph.ranks.program[matches.classes.lowest] == number)
            places = matches.base[mine][:, None] + np.flatnonzero(program.kind != Kind.COMM)
            for column in (own, spread, bias):
                column[places] = np.rint(count[mine] @ column[places] / max(count[mine].sum(), 1))
    if float((own + tail).astype(float) @ np.repeat(count, np.diff(matches.base))) > MOST:
        raise PrismError(
            f"{change.text}: makes durations of {MOST / 1e9:,.0f} s and more; give a smaller factor or time"
        )
    source[chosen] = Source.PLANNED
    changed = packed(matches.base, own, tail, spread, bias, source)
    changed.row = changed.row[matches.classes.of_rank]
    return changed


def packed(base: np.ndarray, *columns: np.ndarray) -> Durations:
    """Durations from arrays of FIELDS by flat node; ranks with equal ones share a row."""
    known: dict[bytes, int] = {}
    row = np.zeros(len(base) - 1, np.int32)
    rows = Durations(row, [], [], [], [], [])
    for rank in range(len(row)):
        part = [column[base[rank] : base[rank + 1]] for column in columns]
        row[rank] = known.setdefault(b"".join(column.tobytes() for column in part), len(known))
        if row[rank] == len(rows.own):
            for name, column in zip(FIELDS, part, strict=True):
                getattr(rows, name).append(column.copy())
    return rows


def _length(solved: Timeline) -> int:
    if solved.iteration_time_ns != UNKNOWN:
        return solved.iteration_time_ns
    return max((int(end.max(initial=0)) for end in solved.end), default=0)


def _half(
    graph: Graph, matches: Matches, before: tuple[Durations, Timeline], after: tuple[Durations, Timeline]
) -> float:
    """Half-width of the gain, in quadrature: two standard errors of its values in the counted iterations; the spread and the
    bias (which add up) of what only one of the critical paths holds, or holds changed; and as much of it as the iteration
    time itself is in doubt."""
    (_, first), (_, last) = before, after
    count = len(first.iteration_ns)
    if not count or first.interval_ns == UNKNOWN:
        return math.nan
    gains = last.iteration_ns - first.iteration_ns
    between = 2 * float(np.std(gains, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    old, new = _on_path(graph, matches, *before), _on_path(graph, matches, *after)
    nothing = np.zeros(2)
    doubt = np.array([new.get(place, nothing) - old.get(place, nothing) for place in old | new]).reshape(-1, 2)
    path = math.hypot(math.sqrt(float(np.sum(doubt[:, 0] ** 2))), float(np.sum(np.abs(doubt[:, 1])))) / count
    share = first.interval_ns / max(first.iteration_time_ns, 1)
    return math.hypot(between, path, share * (last.iteration_time_ns - first.iteration_time_ns))


def _on_path(
    graph: Graph, matches: Matches, known: Durations, solved: Timeline
) -> dict[tuple[bool, int, int], np.ndarray]:
    """Spread and bias of what is on the critical path: of nodes by (False, rank, node), of matches by (True, *meeting)."""
    rank, node = solved.critical.T
    place = np.cumsum([0, *(len(spread) for spread in known.spread)])[known.row[rank]] + node
    doubt = [np.concatenate([np.empty(0, np.int64), *rows])[place] for rows in (known.spread, known.bias)]
    meeting = meetings(graph, matches, solved.critical)
    met = meeting[:, 0] >= 0
    names = np.where(met[:, None], meeting, solved.critical)
    return dict(zip(zip(met.tolist(), *names.T.tolist(), strict=True), np.stack(doubt, 1), strict=True))
