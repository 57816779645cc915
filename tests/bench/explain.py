"""Where fidelity's error comes from: the slices' durations against those of the whole job, kind by kind.

    explain.py WHOLE SLICED     both calibrated; fidelity.py --keep DIR leaves them as CASE.whole.c.h5 and CASE.0.c.h5

For each kind of node: how many an iteration, its mean duration in both, and what the predicted iteration becomes if
only this kind's durations are taken from the whole job.
"""

import copy
import sys

import numpy as np

from prism_tools.calibrate.schedule import timeline
from prism_tools.graph import file
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind, Op, Source


def kinds(graph, rank, sources):
    """A word for each node of `rank`: its kind, operation, lane and where the sliced duration comes from."""
    program = graph.program_of(rank)
    words = []
    for node in range(len(program)):
        kind = Kind(int(program.kind[node])).name.lower()
        if kind == "comm":
            lane = "" if program.lane[node] == 0 else " async"
            kind = f"{Op(int(program.op[node])).name.lower()}{lane} ({Source(int(sources[node])).name.lower()})"
        words.append(kind)
    return np.array(words)


def rows_of(graph):
    """Durations with one row a rank, so that single ranks can be changed."""
    known = copy.deepcopy(graph.durations)
    for name in ("own", "tail", "spread", "bias", "source"):
        rows = getattr(known, name)
        setattr(known, name, [rows[k].copy() for k in known.row])
    known.row = np.arange(graph.world_size, dtype=np.int32)
    return known


def solve(graph, matches, order, durations):
    return timeline(graph, matches, order, durations).iteration_time_ns / 1e6


def main():
    whole, sliced = (file.read(path) for path in sys.argv[1:3])
    matches = find_matches(sliced)
    order = dependency_order(sliced, matches)
    ours, theirs = rows_of(sliced), rows_of(whole)
    base = solve(sliced, matches, order, ours)
    words = [kinds(sliced, rank, ours.source[rank]) for rank in range(sliced.world_size)]
    inside = [np.isin(sliced.program_of(r).segment, list(counted(sliced))) for r in range(sliced.world_size)]
    per = len(counted(sliced)) * sliced.world_size
    print(f"iteration, ms: sliced {base:.3f}  whole {solve(whole, matches, order, theirs):.3f}")
    print(f"{'kind':32} {'per it':>7} {'sliced us':>10} {'whole us':>9} {'tails':>12} {'effect ms':>10}")
    for word in sorted({word for row, known in zip(words, inside, strict=True) for word in row[known]}):
        changed = copy.deepcopy(ours)
        numbers, tails = [], []
        for rank, row in enumerate(words):
            chosen = row == word
            for name in ("own", "tail"):
                getattr(changed, name)[rank][chosen] = getattr(theirs, name)[rank][chosen]
            chosen &= inside[rank]
            numbers.append(np.array([d.own[rank][chosen] for d in (ours, theirs)]))
            tails.append(np.array([d.tail[rank][chosen] for d in (ours, theirs)]))
        mean = np.concatenate(numbers, axis=1).mean(axis=1) / 1e3
        tail = np.concatenate(tails, axis=1).mean(axis=1) / 1e3
        count = sum(n.shape[1] for n in numbers) / per
        effect = solve(sliced, matches, order, changed) - base
        print(f"{word:32} {count:7.1f} {mean[0]:10.1f} {mean[1]:9.1f} {tail[0]:5.0f}/{tail[1]:5.0f} {effect:+10.3f}")


if __name__ == "__main__":
    main()
