"""prism-replay: the sandbox ranks for real, everybody else from the calibrated graph, in real time (P§6)."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from prism_tools.capture import nodes, ranks
from prism_tools.emulate.condense import condense
from prism_tools.emulate.planner import Timed
from prism_tools.emulate.sandbox import (
    check_hash_seed,
    check_kept,
    check_ranks,
    file_name,
    joined_memory,
    memory,
    open_payloads,
    run_sandbox,
    timing,
)
from prism_tools.errors import PrismError
from prism_tools.graph import provenance
from prism_tools.graph.iterations import iteration_times
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Durations, Graph, Replay, Timing
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Op
from prism_tools.launch.slurm import others

TOLERANCE_NS = 50_000  # deliveries later than this are counted
INVALID_SHARE = 0.01  # an iteration whose deliveries are later than this share of it, in sum, proves nothing


def replay(graph: Graph, options: argparse.Namespace) -> Graph:
    """Replay ``options.ranks``; returns ``graph`` with what was measured. PrismError: not calibrated, unknown rank,
    divergence, a failed rank."""
    durations = check_graph(graph, options)
    check_hash_seed(graph)
    sandbox = sorted(options.ranks)
    matches = find_matches(graph)
    planner = Timed(condense(graph, matches, dependency_order(graph, matches), durations, set(sandbox)))
    payloads = open_payloads(graph, options.file)
    check_kept(graph, matches, payloads, sandbox, options.file)
    output = 2 if options.output == "-" else ranks.OURS  # stdout is for the graph
    costs = issue_costs(graph)
    with nodes.ready(options.tool, others(options.nodes, len(sandbox))) as places:
        traces, assistant = run_sandbox(graph, matches, sandbox, planner, payloads, places, output, issue_cost=costs)
    graph.replay = measured(graph, matches, sandbox, traces)
    graph.memory = joined_memory(graph.memory, memory("replay", traces))
    graph.environment = {**graph.environment, "replay": provenance.environment()}
    graph.stage = "replayed"
    if moved := drifted(graph.replay.timing):
        options.progress.warn(
            f"the nodes' clocks moved apart by {moved / 1000:.0f} us meanwhile: waits may be off by as much"
        )
    if assistant.values.unknown:
        options.progress.warn(f"{assistant.values.unknown} contributions were not recorded: losses are not comparable")
    return graph


def check_graph(graph: Graph, options: argparse.Namespace) -> Durations:
    """The graph's durations. PrismError unless it is calibrated and has the ranks ``options.ranks``."""
    check_ranks(graph, options.ranks, options.file)
    if graph.durations is None:
        raise PrismError(f"{file_name(options.file)}: not calibrated yet; run prism-calibrate first")
    return graph.durations


def issue_costs(graph: Graph) -> dict[int, int]:
    """Op → ns that the host takes to issue it on the real backend, as probed; {} where nothing was."""
    probes = graph.probes
    if probes is None:
        return {}
    samples: dict[int, list[int]] = {}
    for op, row in zip(probes.op.tolist(), probes.issue, strict=True):
        if op == Op.SEND:
            samples.setdefault(Op.SEND, []).append(int(row[0]))
            samples.setdefault(Op.RECV, []).append(int(row[1]))
        else:
            samples.setdefault(op, []).append(int(row.mean()))
    return {op: sum(costs) // len(costs) for op, costs in samples.items()}


def measured(graph: Graph, matches: Matches, sandbox: list[int], traces: dict[int, dict[str, Any]]) -> Replay:
    """What the replay's traces say."""
    rows = timing([(rank, 0, 0, traces[rank]) for rank in sandbox])
    count = graph.iterations()
    rows.iteration_ns = [
        iteration_times(graph.program_of(rank), rows.start[k], rows.end[k], range(count))
        for k, rank in enumerate(sandbox)
    ]
    late, late_ns = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for rank in sandbox:
        for node, by in traces[rank]["late"]:
            segment = int(graph.program_of(rank).segment[node])
            if 0 <= segment < count and by > TOLERANCE_NS:  # an iteration that all ranks have
                late[segment] += 1
                late_ns[segment] += by
    longest = np.max(rows.iteration_ns, axis=0)
    touched = {int(group) for rank in sandbox for group in graph.ranks.slots[rank]}
    virtual = {int(member) for group in touched for member in graph.groups.members[group]} - set(sandbox)
    used = {matches.rank_of(m) for m in crossing_members(matches, sandbox)} - set(sandbox)
    return Replay(rows, late, late_ns, late_ns <= INVALID_SHARE * longest, len(touched), len(used & virtual))


def drifted(timing: Timing) -> int:
    """ns by which the rows' clocks moved apart beyond the error of their comparison; 0 if that is no more than a late
    delivery may be."""
    spans = np.array([int(end.max() - issue[0]) for issue, end in zip(timing.host_issue, timing.end, strict=True)])
    moved = np.abs(timing.clock_drift) * spans // 10**9 - 2 * timing.clock_error
    return int(moved.max()) if moved.max() > TOLERANCE_NS else 0


def crossing_members(matches: Matches, sandbox: list[int]) -> list[int]:
    """Flat nodes of all members of the matches that a sandbox rank takes part in."""
    chosen = set()
    for rank in sandbox:
        nodes = matches.of_node[matches.base[rank] : matches.base[rank + 1]]
        chosen |= set(nodes[nodes >= 0].tolist())
    return [member for match in sorted(chosen) for member in matches.members[match].tolist()]
