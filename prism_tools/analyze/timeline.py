"""The picture of the solved timeline: one row a rank, or one a class where there are many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.analyze.waits import held_until, timeline_of
from prism_tools.errors import PrismError
from prism_tools.graph.alike import timed_alike
from prism_tools.graph.iterations import last_nodes
from prism_tools.graph.model import Graph
from prism_tools.graph.names import op_text, ranks_text
from prism_tools.graph.schema import Kind, Op
from prism_tools.graph.semantics import computing_lanes

MOST_ROWS = 64
NAMED = 12  # ranks on the critical path that get rows of their own where classes are drawn
COMPUTE, CRITICAL, WAITING = "#c4c4c4", "#111111", "#ffffff"
COLOURS = {
    Op.ALL_REDUCE: "#1f77b4", Op.ALL_GATHER: "#2ca02c", Op.REDUCE_SCATTER: "#9467bd", Op.ALL_TO_ALL: "#e377c2",
    Op.BROADCAST: "#ff7f0e", Op.SCATTER: "#bcbd22", Op.REDUCE: "#17becf", Op.GATHER: "#8c564b",
    Op.BARRIER: "#d62728", Op.SEND: "#e6a700", Op.RECV: "#a67c00",
}  # fmt: skip
TOGETHER = (
    200  # rectangles in one path; of paths of more than 1,024 corners matplotlib does not align edges with pixels
)
MAIN = (0.36, 0.94)  # bottom and top of the main lane's band within a row whose other lanes lie below it
OTHER = (0.06, 0.32)
ALONE = (0.08, 0.92)


@dataclass
class _Row:
    """One row: the rank that is drawn, and the ranks that it stands for."""

    rank: int
    ranks: list[int]

    def label(self) -> str:
        """rank 512 for 510: 512-513,516-1023."""
        alike = "" if len(self.ranks) == 1 else f" for {len(self.ranks)}: {_short(ranks_text(self.ranks))}"
        return f"rank {self.rank}{alike}"


@dataclass
class _Bars:
    """Rectangles to draw: colour -> [(left, right, bottom, top)], times in ms."""

    spans: dict[str, list[tuple[float, float, float, float]]]
    waiting: list[tuple[float, float, float, float]]
    critical: list[tuple[float, float, float, float]]
    ops: set[Op]


def draw(graph: Graph, path: str, iteration: int | None = None) -> None:
    """Write the picture to ``path`` (its ending says how: .png, .svg, .pdf), of one iteration or of all.

    PrismError if there is no timeline, or no such iteration.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline = timeline_of(graph)
    if iteration is not None and not 0 <= iteration < graph.iterations():
        raise PrismError(f"no iteration {iteration} (file has {graph.iterations()}, counted from 0)")
    rows = _rows(graph)
    bars, zero = _bars(graph, rows, iteration)
    figure = Figure(figsize=(14, min(2.2 + 0.34 * len(rows), 18)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _paint(axes, bars, len(rows))
    for place, row in enumerate(rows):  # where iterations end
        end = timeline.end[timeline.row[row.rank]][last_nodes(graph.program_of(row.rank))]
        axes.vlines((end - zero) / 1e6, place, place + 1, colors=CRITICAL, linewidth=0.8, linestyles=":")
    size = 9 if len(rows) <= 40 else 6
    axes.set_yticks(np.arange(len(rows)) + 0.5, [row.label() for row in rows], fontsize=size)
    axes.set_ylim(len(rows), 0)
    right = max((span[1] for spans in bars.spans.values() for span in spans), default=1.0)
    axes.set_xlim(0, right * 1.005 or 1.0)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = "all iterations" if iteration is None else f"iteration {iteration}"
    what = "ranks" if len(rows) == graph.world_size else f"ranks in {len(rows)} rows"
    axes.set_title(f"{graph.world_size} {what}, {shown}", loc="left", fontsize=10)
    _legend(figure, bars)
    figure.savefig(path)


def _rows(graph: Graph) -> list[_Row]:
    """All ranks, else one row a timing class, else one a program class besides the ranks that the critical path runs
    through most; of more than MOST_ROWS classes those that it runs through most."""
    timeline = timeline_of(graph)
    if graph.world_size <= MOST_ROWS:
        return [_Row(rank, [rank]) for rank in range(graph.world_size)]
    on_path = np.bincount(timeline.critical[:, 0], minlength=graph.world_size)
    classes = _classes(timeline.row)
    if len(classes) > MOST_ROWS:
        key = graph.ranks.program.astype(np.int64)
        named = [rank for rank in np.argsort(-on_path, kind="stable")[:NAMED].tolist() if on_path[rank]]
        key[named] = -1 - np.arange(len(named))  # rows of their own
        classes = _classes(key)
    classes.sort(key=lambda ranks: -int(on_path[ranks].sum()))
    rows = [_Row(max(ranks, key=lambda rank: int(on_path[rank])), ranks) for ranks in classes[:MOST_ROWS]]
    return sorted(rows, key=lambda row: row.ranks[0])


def _classes(key: np.ndarray) -> list[list[int]]:
    """Ranks with equal keys."""
    classes: dict[int, list[int]] = {}
    for rank, number in enumerate(key.tolist()):
        classes.setdefault(number, []).append(rank)
    return list(classes.values())


def _short(text: str) -> str:
    return text if len(text) <= 18 else text[:16].rpartition(",")[0] + ",…"


def _bars(graph: Graph, rows: list[_Row], iteration: int | None) -> tuple[_Bars, int]:
    """The rectangles of all rows, and the time, ns, that is 0 in the picture.

    A node is on the critical path if that of any rank of the row is.
    """
    timeline, matches = timeline_of(graph), timed_alike(graph)
    held = held_until(graph, matches)
    bars = _Bars({}, [], [], set())
    main = [computing_lanes(graph.lanes, graph.program_of(row.rank).lane)[0] for row in rows]
    chosen = [
        # a host beside its streams is left out
        [node for node in _chosen(graph, row.rank, iteration) if graph.program_of(row.rank).lane[node] >= lane]
        for row, lane in zip(rows, main, strict=True)
    ]
    starts = [timeline.start[timeline.row[row.rank]] for row in rows]
    zero = min((int(start[nodes].min()) for start, nodes in zip(starts, chosen, strict=True) if nodes), default=0)
    for place, row in enumerate(rows):
        rank, program, nodes = row.rank, graph.program_of(row.rank), chosen[place]
        start, end = starts[place], timeline.end[timeline.row[rank]]
        critical = np.isin(nodes, timeline.critical[np.isin(timeline.critical[:, 0], row.ranks), 1]).tolist()
        bands = _bands(program.lane, main[place], nodes, start, end)
        at = np.array(nodes, np.int64)
        lefts, rights = ((times[at] - zero) / 1e6 for times in (start, end))
        frees = np.clip((held[matches.flat(rank, at)] - zero) / 1e6, lefts, rights)
        columns = (lefts, frees, rights, program.kind[at], program.op[at])
        for k, (left, free, right, kind, op) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            low, high = bands[nodes[k]]
            bottom, top = place + 1 - high, place + 1 - low  # the axis points down
            if free > left:
                bars.waiting.append((left, free, bottom, top))
            if kind == Kind.COMM:
                bars.ops.add(Op(op))
            colour = COLOURS.get(op, COMPUTE) if kind == Kind.COMM else COMPUTE
            bars.spans.setdefault(colour, []).append((free, right, bottom, top))
            if critical[k]:
                bars.critical.append((free if kind in (Kind.COMM, Kind.WAIT) else left, right, bottom, top))
    return bars, zero


def _bands(
    lane: np.ndarray, main: int, nodes: list[int], start: np.ndarray, end: np.ndarray
) -> dict[int, tuple[float, float]]:
    """Bottom and top of each node within its row: other lanes below the main one, side by side where they overlap."""
    beside = sorted((node for node in nodes if lane[node] != main), key=lambda node: int(start[node]))
    free: list[int] = []  # when each track becomes free
    track = {}
    for node in beside:
        fits = [k for k, until in enumerate(free) if until <= start[node]] or [len(free)]
        if fits[0] == len(free):
            free.append(0)
        track[node] = fits[0]
        free[fits[0]] = int(end[node])
    if not beside:
        return dict.fromkeys(nodes, ALONE)
    height = (OTHER[1] - OTHER[0]) / len(free)
    tops = {node: OTHER[1] - height * k for node, k in track.items()}
    return {node: (tops[node] - height, tops[node]) if node in tops else MAIN for node in nodes}


def _chosen(graph: Graph, rank: int, iteration: int | None) -> list[int]:
    """The nodes to draw: those of ``iteration``, else of all iterations, else of the whole program."""
    segment = graph.program_of(rank).segment
    if iteration is not None:
        return np.flatnonzero(segment == iteration).tolist()
    return np.flatnonzero(segment >= 0).tolist() if graph.iterations() else list(range(len(segment)))


def _paint(axes: object, bars: _Bars, rows: int) -> None:
    line = 1.6 if rows <= 16 else 0.8
    for colour, spans in bars.spans.items():
        _fill(axes, spans, facecolors=colour, linewidths=0)
    _fill(axes, bars.waiting, facecolors=WAITING, edgecolors="#dddddd", linewidths=0.4)
    _fill(axes, bars.critical, facecolors="none", edgecolors=CRITICAL, linewidths=line, zorder=3)


def _fill(axes: object, spans: list[tuple[float, float, float, float]], **look: object) -> None:
    """Draw rectangles, many in one path: each path by itself takes much longer."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    left, right, bottom, top = np.array(spans).reshape(-1, 4).T
    corners = np.stack([[left, bottom], [right, bottom], [right, top], [left, top], [left, bottom]]).transpose(2, 0, 1)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    parts = [corners[first : first + TOGETHER] for first in range(0, len(corners), TOGETHER)]
    paths = [Path(part.reshape(-1, 2), np.tile(np.array(codes, np.uint8), len(part))) for part in parts]
    axes.add_collection(PathCollection(paths, **look), autolim=False)  # type: ignore[attr-defined]


def _legend(figure: object, bars: _Bars) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COMPUTE, label="compute")]
    entries += [Patch(facecolor=COLOURS.get(op, COMPUTE), label=op_text(op)) for op in sorted(bars.ops)]
    entries.append(Patch(facecolor=WAITING, edgecolor="#bbbbbb", label="waiting"))
    entries.append(Patch(facecolor="none", edgecolor=CRITICAL, linewidth=1.6, label="critical path"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(len(entries), 8), frameon=False)  # type: ignore[attr-defined]
