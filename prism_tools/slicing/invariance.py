"""The graph's own falsifier (design §2): virtual peers are late at random; a span that moves with them misses an edge."""

from __future__ import annotations

import argparse

import numpy as np

from prism_tools.capture import ranks
from prism_tools.emulate.planner import AtOnce
from prism_tools.emulate.sandbox import check_hash_seed, open_payloads, run_sandbox
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import node_text
from prism_tools.graph.own import own_times
from prism_tools.slicing.plan import slices
from prism_tools.tensors.payload import PayloadReader

CONFIRM = 4  # further pairs of runs in which a suspicion must hold: on a busy machine spans grow by chance
SHARE = 0.25  # of the largest delay (delays are half of it at least): a span that always grows by more is flagged
MILLISECOND = 1_000_000


def invariance(graph: Graph, options: argparse.Namespace) -> int:
    """Repeat every slice with random virtual delays; print the nodes whose own time moves (TSV); 1 if there are any."""
    check_hash_seed(graph)
    moved = moving_nodes(graph, options)
    print("rank\tnode\tmoved_ms\twhat")
    for rank, node, by in moved:
        print(f"{rank}\t{node}\t{by / MILLISECOND:.1f}\t{node_text(graph, rank, node)}")
    if moved:
        options.progress.warn(f"{len(moved)} nodes move with delays that they do not depend on: the graph misses edges")
    return 1 if moved else 0


def moving_nodes(graph: Graph, options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(rank, node, ns) of every node that grows by more than SHARE of the delay whenever peers are late."""
    matches = find_matches(graph)
    payloads = open_payloads(graph, options.file)
    ranks.preload()
    delay = round(options.delay * MILLISECOND)
    found = []
    for number, sandbox in enumerate(slices(graph, options.size)):
        plain: list[dict[int, np.ndarray]] = []
        late: list[dict[int, np.ndarray]] = []
        moved: list[tuple[int, int, int]] = []
        while len(late) <= CONFIRM and (moved or not late):
            options.progress.update(f"slice {number + 1}  pair of runs {len(late) + 1}")
            plain.append(own_of_slice(graph, matches, payloads, sandbox, 0, 0))
            late.append(own_of_slice(graph, matches, payloads, sandbox, delay, options.seed + len(late) + 1))
            moved = growing(plain, late, SHARE * delay)
        found += moved
    return found


def growing(
    plain: list[dict[int, np.ndarray]], late: list[dict[int, np.ndarray]], least: float
) -> list[tuple[int, int, int]]:
    """(rank, node, ns): the nodes that took ``least`` longer in each late run than in any plain one."""
    found = []
    for rank in plain[0]:
        growth = np.min([run[rank] for run in late], axis=0) - np.max([run[rank] for run in plain], axis=0)
        found += [(rank, node, int(growth[node])) for node in np.flatnonzero(growth > least).tolist()]
    return found


def own_of_slice(
    graph: Graph, matches: Matches, payloads: PayloadReader | None, sandbox: list[int], delay: int, seed: int
) -> dict[int, np.ndarray]:
    """Own times of the sandbox's nodes, with virtual peers up to ``delay`` ns late."""
    planner = AtOnce(graph, matches, set(sandbox), delay, seed)
    traces, _ = run_sandbox(graph, matches, sandbox, planner, payloads, None, ranks.SILENT)
    result = {}
    for rank, trace in traces.items():
        times = trace["times"]
        result[rank] = own_times(graph.program_of(rank), times[:, 2], times[:, 3])
    return result
