"""What a live graph says: does its own solve give back what was measured, and does it tell what a delay would do?"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from prism_tools.calibrate.durations import durations
from prism_tools.calibrate.measured import read_rows
from prism_tools.calibrate.solver import solve
from prism_tools.graph import file
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import HOST_LANE, UNKNOWN, Kind

WORD = ("kind", "op", "lane", "slot")  # columns that must be alike for two iterations to be the same program


@dataclass(frozen=True)
class Delay:
    """One delay that the program was told to make."""

    rank: int
    layer: int
    ms: float
    where: str  # "gpu" or "host"


def delay_classes(spec):
    """The delays of each class of live_gpt.py's --delay; class 0 has none."""
    classes = [text.split(",") for text in spec.split("+") if text]
    split = [[item.split(":") for item in items] for items in classes]
    return [[], *([Delay(int(r), int(layer), float(ms), where) for r, layer, ms, where in items] for items in split)]


class Live:
    """A graph whose ranks all ran for real at once, with its measured times on one clock: lists by rank, int64 ns."""

    def __init__(self, path):
        self.graph = graph = file.read(str(path))
        self.matches = find_matches(graph)
        self.order = dependency_order(graph, self.matches)
        self.programs = [graph.program_of(rank) for rank in range(graph.world_size)]
        measured = read_rows(graph)
        rows = [mine[0] for mine in measured.rows]
        columns = (measured.issued, measured.start, measured.ready, measured.end)
        self.issued, self.start, self.ready, self.end = ([column[row] for row in rows] for column in columns)
        self.durations = per_rank(graph, durations(graph, self.matches))
        self.chosen = list(counted(graph))

    def solve(self, known):
        """(starts, ends) by rank."""
        return solve(self.graph, self.matches, self.order, known)

    def iteration_ns(self, end):
        """float[all iterations]: from the last node's end to the next last node's, mean over ranks; NaN for the first.

        A mark ends with the host's part of an iteration: the device's work may still be under way, and belongs to it.
        """
        count, times = self.graph.iterations(), []
        for program, mine in zip(self.programs, end, strict=True):
            ends = [mine[program.segment == k].max() for k in range(count)]
            times.append(np.diff(np.array(ends, float), prepend=np.nan))
        return np.mean(times, axis=0)


def per_rank(graph, known):
    """A copy of durations with a row for every rank, to be changed."""
    columns = {
        name: [getattr(known, name)[row].copy() for row in known.row]
        for name in ("own", "tail", "spread", "bias", "source")
    }
    return replace(known, row=np.arange(graph.world_size, dtype=np.int32), **columns)


def host_gaps(live, rank):
    """(nodes of the host's lane, ns between the end of the node before and the start of each): what tracing took."""
    nodes = np.flatnonzero(live.programs[rank].lane == HOST_LANE)
    start, end = live.start[rank][nodes], live.end[rank][nodes]
    gaps = np.append(0, start[1:] - end[:-1])
    unknown = (start == UNKNOWN) | np.append(True, end[:-1] == UNKNOWN)
    return nodes, np.where(unknown, 0, np.maximum(gaps, 0))


def with_tracing_cost(live):
    """Durations in which the host's spans also take the gaps beside them: of a traced run, not of the program.

    A gap belongs to the span that follows; what lies before an operation is handed over, to the span before.
    Also, by rank, the ns at the front of each node that are such a gap.
    """
    known, front = per_rank(live.graph, live.durations), [np.zeros(len(program), np.int64) for program in live.programs]
    for rank, program in enumerate(live.programs):
        nodes, gaps = host_gaps(live, rank)
        compute = program.kind[nodes] == Kind.COMPUTE
        own, after = known.own[rank], np.append(gaps[1:], 0)  # the gap that follows each of `nodes`
        ahead = np.where(compute, np.minimum(_before_issue(live, rank)[nodes], after), 0)
        ahead[:-1] = np.where(compute[1:] | ~compute[:-1], ahead[:-1], after[:-1])
        front[rank][nodes[1:]] = np.where(compute[1:], gaps[1:] - ahead[:-1], 0)
        own[nodes] += ahead
        own += front[rank]
    return known, front


def _before_issue(live, rank):
    """By node: ns from its end until the first operation that it issued was handed over."""
    program, end, issued = live.programs[rank], live.end[rank], live.issued[rank]
    source, target = program.edges.T
    chosen = (program.kind[target] == Kind.COMM) & (issued[target] != UNKNOWN) & (end[source] != UNKNOWN)
    chosen &= program.lane[source] == HOST_LANE
    least = np.full(len(end), np.iinfo(np.int64).max)
    np.minimum.at(least, source[chosen], issued[target[chosen]] - end[source[chosen]])
    return np.where(least == np.iinfo(np.int64).max, 0, np.maximum(least, 0))


def tracing_cost(live):
    """(ns a traced operation, operations an iteration, ns an iteration): medians over iterations and ranks; the first is
    the lower quartile of the operations: a host that is far ahead is stopped by the driver in any call, ours too."""
    each, counts, spent = [], [], []
    for rank, program in enumerate(live.programs):
        nodes, gaps = host_gaps(live, rank)
        for k in live.chosen:
            mine = gaps[(program.segment[nodes] == k) & (gaps > 0)]
            counts.append(np.sum((program.segment == k) & (program.kind != Kind.COMPUTE)))
            spent.append(mine.sum())
            each.append(np.percentile(mine, 25) if len(mine) else 0)
    return float(np.median(each)), float(np.median(counts)), float(np.median(spent))


def consistency(live, known, front=None):
    """How far the solve with `known` is from what was measured, in percent of an iteration.

    Starts are aligned in each iteration by its communication: what adds up from one to the next is in its time. A
    communication starts when it is ready: then it arrives. `front`: see with_tracing_cost.
    """
    starts, ends = live.solve(known)
    if front is not None:
        starts = [start + gap for start, gap in zip(starts, front, strict=True)]
    measured, solved = live.iteration_ns(live.end)[live.chosen], live.iteration_ns(ends)[live.chosen]
    off = 100 * (solved / measured - 1)
    deviation = {"communication": [], "a stream's points": [], "the host's nodes": []}
    shifts = {k: _shift(live, starts, k) for k in live.chosen}
    streams = any(name.startswith("stream") for name in live.graph.lanes)
    for rank, program in enumerate(live.programs):
        is_comm, on_host = program.kind == Kind.COMM, (program.lane == HOST_LANE) & streams
        points = ~on_host & (program.kind != Kind.COMPUTE)  # where a span ends, and the next one can begin
        at_end = points & ~is_comm
        seen = np.where(is_comm, live.ready[rank], np.where(at_end, live.end[rank], live.start[rank]))
        told = np.where(at_end, ends[rank], starts[rank])
        inside = np.isin(program.segment, live.chosen) & (seen != UNKNOWN)
        shift = np.array([shifts.get(k, 0) for k in program.segment.tolist()])
        gap = np.abs(seen - told - shift)
        for name, which in zip(deviation, (is_comm, points, on_host), strict=True):
            deviation[name].append(gap[inside & which])
    found = {"iteration, largest error": float(np.abs(off).max()), "iteration, mean error": float(off.mean())}
    for name, parts in deviation.items():
        values = np.concatenate(parts) * 100 / np.median(measured)
        if len(values):
            found[f"start of {name}, median"] = float(np.median(values))
            found[f"start of {name}, largest"] = float(values.max())
    return found


def unexplained(live):
    """What waits take after the last of what the graph says they wait for, percent of an iteration: the median over the
    counted iterations, of the worst rank. A solve gives any time back that is put into a node; here a lost edge shows."""
    times, shares = live.iteration_ns(live.end), []
    for rank, program in enumerate(live.programs):
        own = np.where(program.kind == Kind.WAIT, live.durations.own[rank], 0)
        shares.append(np.median([100 * own[program.segment == k].sum() / times[k] for k in live.chosen]))
    return float(max(shares))


def _shift(live, starts, k):
    """Measured less solved start of the communication in iteration k, ns: the median over all ranks."""
    apart = []
    for rank, program in enumerate(live.programs):
        comm = (program.segment == k) & (program.kind == Kind.COMM) & (live.ready[rank] != UNKNOWN)
        apart.append((live.ready[rank] - starts[rank])[comm])
    return np.median(np.concatenate(apart))


def alike(live):
    """The iterations, warm-up included, that are the same program as most of the counted ones on every rank; and for
    each rank their nodes, int[iterations, places]."""
    count, found = live.graph.iterations(), []
    for program in live.programs:
        words = np.stack([program.columns[name].astype(np.int64) for name in WORD])
        each = [words[:, program.segment == k].tobytes() for k in range(count)]
        usual = Counter(each[k] for k in live.chosen).most_common(1)[0][0]
        found.append({k for k in range(count) if each[k] == usual})
    iterations = sorted(set.intersection(*found))
    nodes = [np.array([np.flatnonzero(p.segment == k) for k in iterations]) for p in live.programs]
    return iterations, nodes


class Prediction:
    """A model made of the undelayed iterations alone, and what it says of the delayed ones."""

    def __init__(self, live, classes):
        self.live, self.classes = live, classes
        self.traced, _ = with_tracing_cost(live)
        self.iterations, self.nodes = alike(live)
        self.kind = np.array(self.iterations) % len(classes)
        self.usable = np.isin(self.iterations, live.chosen)
        for j in range(len(classes)):
            if not (self.usable & (self.kind == j)).any():
                raise ValueError(
                    f"no usable iteration of delay class {j}: {len(self.iterations)} are alike; more --steps"
                )
        self.measured = self.effects(live.end)
        self.places = [self.delayed(j) for j in range(len(classes))]

    def dropped(self):
        """How many counted iterations are another program than the others."""
        return len(self.live.chosen) - int(self.usable.sum())

    def middle(self, name, rank, j):
        """Median of durations' column over the iterations of class j, by place."""
        return np.median(getattr(self.traced, name)[rank][self.nodes[rank][self.usable & (self.kind == j)]], axis=0)

    def effects(self, end):
        """(undelayed iteration, ns; by class what is added to it, ns): medians."""
        times = self.live.iteration_ns(end)[self.iterations]
        medians = [np.median(times[self.usable & (self.kind == j)]) for j in range(len(self.classes))]
        return medians[0], np.array(medians) - medians[0]

    def delayed(self, j):
        """(rank, place, growth in ns, delay) of each delay of class j: the spans that grew the most on the lanes that
        the delay is on. Backward meets the last layer first."""
        found = []
        for rank in sorted({delay.rank for delay in self.classes[j]}):
            growth = self.middle("own", rank, j) - self.middle("own", rank, 0)
            for device in (False, True):
                lanes = self.lanes(rank, device)
                mine = [delay for delay in self.classes[j] if delay.rank == rank and self.on_device(delay) == device]
                largest = np.sort(np.argsort(np.where(lanes, growth, -np.inf))[::-1][: len(mine)])
                mine.sort(key=lambda delay: -delay.layer)
                found += [(rank, place, growth[place], delay) for place, delay in zip(largest, mine, strict=True)]
        return found

    def on_device(self, delay):
        """Without streams, what is meant for the device delays the host."""
        return delay.where == "gpu" and any(name.startswith("stream") for name in self.live.graph.lanes)

    def lanes(self, rank, device):
        """Which places are spans of a stream, or of the host."""
        program, first = self.live.programs[rank], self.nodes[rank][0]
        names = np.array([name.startswith("stream") for name in self.live.graph.lanes])
        lane = program.lane[first]
        return (program.kind[first] == Kind.COMPUTE) & (names[lane] if device else lane == HOST_LANE)

    def model(self, amount, explained=False):
        """Durations of all iterations: medians of the undelayed ones, with `amount(growth, delay)` ns added at each
        delay; `explained`: instead with the spans of their own class, which contention has changed."""
        known = per_rank(self.live.graph, self.traced)
        for rank, nodes in enumerate(self.nodes):
            spans = self.live.programs[rank].kind[nodes[0]] == Kind.COMPUTE
            for j in range(len(self.classes)):
                own = self.middle("own", rank, 0)
                if explained:
                    own = np.where(spans, self.middle("own", rank, j), own)
                else:
                    for owner, place, growth, delay in self.places[j]:
                        own[place] += amount(growth, delay) if owner == rank else 0
                known.own[rank][nodes[self.kind == j]] = np.rint(own)
            known.tail[rank][nodes] = np.rint(self.middle("tail", rank, 0))
        return known

    def error(self):
        """Standard error of what each class adds to an iteration, ns (of a difference of medians)."""
        times = self.live.iteration_ns(self.live.end)[self.iterations]
        each = [times[self.usable & (self.kind == j)] for j in range(len(self.classes))]
        # half the interquartile range is 0.67 standard deviations, and a median's error 1.25 of a mean's
        variance = [(1.25 * np.subtract(*np.percentile(t, [75, 25])) / 2 / 0.67) ** 2 / max(len(t), 1) for t in each]
        return np.sqrt(variance[0] + np.array(variance))

    def each(self, amount):
        """What each class adds, ns: the delays put into every undelayed iteration with its own durations; the median."""
        base = self.live.iteration_ns(self.live.solve(self.traced)[1])[self.iterations]
        plain, effects = self.usable & (self.kind == 0), [0.0]
        for j in range(1, len(self.classes)):
            known = per_rank(self.live.graph, self.traced)
            for rank, place, growth, delay in self.places[j]:
                known.own[rank][self.nodes[rank][plain, place]] += np.int64(amount(growth, delay))
            times = self.live.iteration_ns(self.live.solve(known)[1])[self.iterations]
            effects.append(float(np.median((times - base)[plain])))
        return np.array(effects)

    def predictions(self):
        """By name of the predictor: what each class adds to an iteration, ns; class 0 first."""
        given = self.model(lambda _, delay: 1e6 * delay.ms)
        solved = {"median model": given, "contention explained": self.model(None, explained=True)}
        found = {
            "as given": self.each(lambda _, delay: 1e6 * delay.ms),
            "as measured": self.each(lambda growth, _: growth),
        }
        found |= {name: self.effects(self.live.solve(known)[1])[1] for name, known in solved.items()}
        found["null: sum"] = np.array([1e6 * sum(delay.ms for delay in items) for items in self.classes])
        found["null: no waits"] = self.effects(without_waits(self.live, given)[1])[1]
        return found


def without_waits(live, known):
    """Solve as if no stream waited for another (without streams: as if the host waited for no communication)."""
    streams = np.array([name.startswith("stream") for name in live.graph.lanes])
    programs = []
    for program in live.graph.programs:
        source, target = program.edges.T
        lane = program.lane[target]
        waits = (program.kind[target] == Kind.WAIT) & (program.lane[source] != HOST_LANE)
        waits &= streams[lane] if streams.any() else lane == HOST_LANE
        programs.append(replace(program, edges=program.edges[~waits]))
    graph = replace(live.graph, programs=programs)
    return solve(graph, live.matches, dependency_order(graph, live.matches), known)
