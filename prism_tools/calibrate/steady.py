"""The steady state: what an iteration takes in the long run, if it were repeated for ever, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.recurrence import Recurrence
from prism_tools.calibrate.solver import among_all
from prism_tools.graph.classes import classes_of
from prism_tools.graph.equations import flat, system_of
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations, Graph, Program, Ragged, Steady, Timeline
from prism_tools.graph.names import node_text
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import UNKNOWN

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order

HORIZON = 200  # iterations in which the period is looked for
INSIDE = 1  # beside 0 and less: how many iterations before this one a source is
MOST = 5_000_000  # nodes of an iteration of ranks that all differ; more would take minutes
SURE = 0.01  # of the iteration time: differences that are worth a word
ALIKE = ("kind", "op", "lane", "slot", "peer", "root")  # columns in which nodes of the same place agree


@dataclass
class _Template:
    """Iteration ``number``, like the one before it; ``first[p][k]``: program p's first node of iteration k;
    ``alike``: the counted iterations with the same nodes."""

    number: int
    alike: list[int]
    first: list[np.ndarray]


def steady_state(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Steady | None:
    """The steady state of the last counted iteration that is like the one before it; None without iterations.

    Each node takes the mean of what it takes at its place in all counted iterations with the same nodes: what is left of
    the iterations' mean time beyond this is what their differences cost. Where an iteration cannot be repeated,
    ``problem`` says why.
    """
    if not graph.iterations():
        return None
    template = _template(graph)
    if isinstance(template, str):
        return _none(template)
    if np.any(durations.row != durations.row[matches.classes.lowest[matches.classes.of_rank]]):
        matches = find_matches(graph, classes=classes_of(graph, durations.row))
        order = dependency_order(graph, matches)
    lengths = np.array([first[template.number + 1] - first[template.number] for first in template.first])
    if (count := int(lengths[graph.ranks.program[matches.classes.lowest]].sum())) > MOST:
        return _none(f"an iteration has {count:,} nodes of ranks that differ, more than {MOST:,}")
    built = _recurrence(graph, matches, order, _averaged(graph, durations, template), template)
    if isinstance(built, str):
        return _none(built)
    recurrence, variables = built
    cycle = recurrence.cycle()
    if cycle is None:
        return _none("no node depends on the iteration before")
    since, period = recurrence.period(cycle, HORIZON)
    total = int(matches.base[-1])
    nodes = [int(variables[k] % total) for k in cycle.variables if variables[k] < 2 * total]  # releases are of no node
    nodes = [node for k, node in enumerate(nodes) if not k or node != nodes[k - 1]]
    met = matches.of_node[nodes]
    jumps = np.append((met[1:] >= 0) & (met[1:] == met[:-1]), False)[: len(nodes)]
    way = [(matches.rank_of(node), matches.node_of(node), jump) for node, jump in zip(nodes, jumps, strict=True)]
    critical = among_all(graph, matches.classes, np.array(way, np.int64).reshape(-1, 3))
    return Steady("", cycle.total, cycle.iterations, since, period, HORIZON, critical)


def borrowed(solved: Timeline, steady: Steady | None) -> bool:
    """Whether the counted iterations are shorter, by more than is in doubt, than one that is repeated for ever: some ranks
    worked off what others had sent during a slower warm-up. Then what makes the warm-up faster makes them slower."""
    if steady is None or steady.problem or solved.iteration_time_ns == UNKNOWN:
        return False
    doubt = max(solved.interval_ns, SURE * solved.iteration_time_ns)
    return steady.total_ns / steady.iterations > solved.iteration_time_ns + doubt


def _none(problem: str) -> Steady:
    return Steady(problem, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, HORIZON, np.empty((0, 2), np.int64))


def _template(graph: Graph) -> _Template | str:
    count = graph.iterations()
    first = [np.searchsorted(_counting(program), np.arange(count + 1)) for program in graph.programs]
    keys = [
        [_key(program, starts[k], starts[k + 1]) for k in range(count)]
        for program, starts in zip(graph.programs, first, strict=True)
    ]
    whole = list(zip(*keys, strict=True))
    chosen = [k for k in counted(graph) if k and whole[k] == whole[k - 1]]
    if not chosen:
        return "one iteration only" if count == 1 else "no two counted iterations in a row do the same"
    number = chosen[-1]
    return _Template(number, [k for k in counted(graph) if whole[k] == whole[number]], first)


def _counting(program: Program) -> np.ndarray:
    """Segments that never decrease: the epilogue after the last iteration."""
    return np.where(program.segment < UNKNOWN, np.iinfo(np.int32).max, program.segment)


def _key(program: Program, start: int, end: int) -> bytes:
    return b"|".join(program.columns[name][start:end].tobytes() for name in ALIKE)


def _averaged(graph: Graph, durations: Durations, template: _Template) -> Durations:
    """``durations``, in which the nodes of the template take the mean of their places."""
    both = durations.row.astype(np.int64) * len(graph.programs) + graph.ranks.program
    distinct, row = np.unique(both, return_inverse=True)
    own: list[np.ndarray] = []
    tail: list[np.ndarray] = []
    for key in distinct.tolist():
        first = template.first[key % len(graph.programs)]
        length = first[template.number + 1] - first[template.number]
        places = first[template.alike][:, None] + np.arange(length)
        for rows, given in ((own, durations.own), (tail, durations.tail)):
            rows.append(given[key // len(graph.programs)].copy())
            rows[-1][places[template.alike.index(template.number)]] = np.rint(rows[-1][places].mean(axis=0))
    return Durations(row.astype(np.int32), own, tail, [], [], [])


def _recurrence(
    graph: Graph, matches: Matches, order: Order, durations: Durations, template: _Template
) -> tuple[Recurrence, np.ndarray] | str:
    """The equations of the template's nodes, and which variable of graph/equations.py each one determines."""
    number, total = template.number, int(matches.base[-1])
    chosen = graph.ranks.program[matches.classes.lowest]
    segment = flat([program.segment for program in graph.programs], chosen)
    inside = segment == number
    met = matches.of_node >= 0
    count = np.bincount(matches.of_node[met], inside[met], minlength=len(matches))
    for match in np.flatnonzero((count > 0) & (count < np.diff(matches.members.offset)))[:1].tolist():
        members = matches.members[match]
        return f"{_text(graph, matches, int(members[inside[members]][0]))} meets another iteration"
    leavers = order.releases.leavers
    of_step = np.maximum(order.steps, 0)  # a node that the step is of
    of_step[order.steps < 0] = leavers.data[leavers.offset[-order.steps[order.steps < 0] - 1]]
    system = system_of(matches, order, durations, order.steps[inside[of_step]])
    place = np.full(2 * total + len(order.releases), -1, np.int64)
    place[system.variable] = np.arange(len(system.variable))
    source, owner = system.sources.data, np.repeat(np.arange(len(system.variable)), np.diff(system.sources.offset))
    at = np.where(place[source] >= 0, INSIDE, segment[np.minimum(source, total - 1)] - number)
    for k in np.flatnonzero((at < -1) & (at >= -number)):
        return f"{_text(graph, matches, int(system.variable[owner[k]] % total))} waits for an iteration before the last"
    before = np.array([starts[number] - starts[number - 1] for starts in template.first], np.int64)
    shift = np.repeat(before[chosen], np.diff(matches.base))
    far = at == -1  # the variable's place in this iteration is what the next one takes
    carried, slot = np.unique(source[far] + shift[source[far]], return_inverse=True)
    row = place[source]
    row[far] = len(system.variable) + slot
    kept = (at == INSIDE) | far  # what came before all iterations has ended long ago
    offset = np.concatenate([[0], np.cumsum(np.bincount(owner[kept], minlength=len(system.variable)))])
    return Recurrence(Ragged(offset, row[kept]), system.delay, place[carried]), system.variable


def _text(graph: Graph, matches: Matches, flat: int) -> str:
    return node_text(graph, matches.rank_of(flat), matches.node_of(flat))
