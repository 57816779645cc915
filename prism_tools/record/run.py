"""One recording, from the options to the file: fork server, coordinator, payloads, graph."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prism_tools.capture import imports, nodes, ranks
from prism_tools.capture.server import Failure
from prism_tools.errors import PrismError
from prism_tools.graph import file, provenance
from prism_tools.graph.model import Graph, Launch, Payload
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import EPILOGUE, PRETEND_CUDA, PROLOGUE, UNKNOWN, ReduceOrder
from prism_tools.graph.stream import signals_wait
from prism_tools.launch.program import allowed_environment, check_program, fix_hash_seed
from prism_tools.launch.slurm import all_of
from prism_tools.record.alone import Alone, explanation, unanswered
from prism_tools.record.build import build
from prism_tools.record.coordinator import Coordinator
from prism_tools.record.replicas import Replicas, summary
from prism_tools.tensors.payload import PayloadWriter
from prism_tools.tensors.rules import Rules, load


def record(options: argparse.Namespace) -> int:
    """Record the program of ``options``; returns the exit status. PrismError: deadlock, mismatch, a failed rank, no space."""
    check_program(options.command)
    if options.explain_rules:
        return explain(options)
    check_writable(options.output)
    if os.path.exists(options.output) and not os.path.isfile(options.output):
        raise PrismError(f"{options.output}: is a pipe or a device; name a file, beside which payloads can lie")
    rules = load(options.rules) if options.rules else None
    launch = describe(options, fix_hash_seed())
    cut = cut_ranks(options)
    payloads = PayloadWriter(payload_path(options.output), options.tensor_budget)
    options.progress.log = options.verbose > 0 and not options.quiet
    place = None if rules is not None else all_of(options.nodes, options.world_size)
    if rules is not None and options.nodes > 1:
        options.progress.warn("with --rules the ranks run on this node only")
    where = f" on each of {place.nodes} nodes" if place else ""
    options.progress.say(
        f"{options.world_size} ranks, {options.jobs} at a time{where}; payloads: {tensors_text(options.tensors)}"
    )
    try:
        modules = imports.modules_of(launch.argv, launch.cwd)
        with nodes.ready(options.tool, place, True, modules, options.pretend_cuda) as places:
            kind = Coordinator if rules is None else Alone
            coordinator = kind(options.jobs, payloads, cut, launch.reduce_order, places)
            try:
                _finish(options, coordinator, launch, _run_or_keep(options, coordinator, launch, rules))
            finally:
                coordinator.close()
    finally:
        payloads.discard()
    return 0


def _run_or_keep(
    options: argparse.Namespace, coordinator: Coordinator, launch: Launch, rules: Rules | None
) -> dict[int, Any]:
    """The traces of all ranks; what is known when a run fails is kept."""
    pace = Pace()
    try:
        traces = _run(options, coordinator, launch, rules, pace)
    except PrismError as problem:
        _keep_partial(options, coordinator, launch, problem)
        raise
    switches, elapsed = coordinator.turns.switches, pace.elapsed()
    options.progress.say(f"{len(traces)} ranks recorded: {switches:,} switches in {elapsed:.1f} s")
    return traces


def _finish(options: argparse.Namespace, coordinator: Coordinator, launch: Launch, traces: dict[int, Any]) -> None:
    payloads, mode = coordinator.payloads, tensors_text(options.tensors)
    kept = payloads.finish(f"partial {mode}".removesuffix(" all") if payloads.lost else mode)
    with signals_wait():  # a kill may come between the two: the reader then finds the store under its other name
        graph = _write(options, coordinator, launch, kept, traces)
        payloads.commit()
    if payloads.lost:
        options.progress.warn(loss_text(graph, payloads))


def explain(options: argparse.Namespace) -> int:
    """Run the ranks, record nothing, and print which rule answers what; 1 if an operation has none and needs one."""
    rules = load(options.rules)
    launch = describe(options, fix_hash_seed())
    with tempfile.TemporaryDirectory() as folder:
        payloads = PayloadWriter(os.path.join(folder, "explain.payload"), 0)
        coordinator = Alone(options.jobs, payloads, frozenset(), launch.reduce_order)
        try:
            ranks.preload(True, imports.modules_of(launch.argv, launch.cwd), options.pretend_cuda)
            _run(options, coordinator, launch, rules, Pace())
        finally:
            coordinator.close()
            payloads.discard()
    options.progress.clear()
    print(explanation(rules, coordinator.answered))
    lacking = unanswered(coordinator.answered)
    if lacking:
        raise PrismError(f"{options.rules}: {lacking:,} operations need a rule; see NO RULE above")
    return 0


def cut_ranks(options: argparse.Namespace) -> frozenset[int] | None:
    """The ranks into which wanted payloads cross; None: all payloads are wanted. PrismError: a rank that is not there."""
    if options.tensors == "all":
        return None
    chosen = frozenset() if options.tensors == "none" else frozenset(options.tensors)
    if chosen and max(chosen) >= options.world_size:
        there = f"the program has ranks 0-{options.world_size - 1}"
        raise PrismError(f"--tensors {tensors_text(options.tensors)}: no rank {max(chosen)}; {there}", status=2)
    return chosen


def tensors_text(tensors: str | list[int]) -> str:
    """--tensors as it is written on a command line."""
    return tensors if isinstance(tensors, str) else f"cut={ranks_text(tensors)}"


def loss_text(graph: Graph, payloads: PayloadWriter) -> str:
    """How many payloads are summaries only, and since when."""
    segments = [int(graph.program_of(rank).segment[node]) for rank, node in payloads.summarised]
    names = {PROLOGUE: "the prologue", EPILOGUE: "the epilogue"}
    first = min(segments, key=lambda segment: (segment == EPILOGUE, segment))
    many = "payloads are summaries" if len(segments) > 1 else "payload is a summary"
    what = f"beyond the budget {len(segments):,} {many} only"
    return f"{what} ({payloads.lost:,} B, since {names.get(first, f'iteration {first}')}); add --tensor-budget"


def describe(options: argparse.Namespace, hash_seed: int) -> Launch:
    """How to run the program again. Seeds of ranks come from the system once, here."""
    entropy = np.array([secrets.randbits(63) for _ in range(options.world_size)], np.uint64)
    stop_after = options.warmup + options.iterations if options.iterations else UNKNOWN
    return Launch(
        argv=list(options.command),
        cwd=os.getcwd(),
        env=allowed_environment(),
        python=sys.executable,
        nproc_per_node=options.nproc_per_node,
        device=PRETEND_CUDA if options.pretend_cuda else "cpu",
        backend="gloo",
        hash_seed=hash_seed,
        entropy=entropy,
        warmup=options.warmup,
        stop_after=stop_after,
        reduce_order=ReduceOrder(options.reduce_order),
    )


def spec_of(launch: Launch, rank: int, eager_sends: bool) -> ranks.Spec:
    """A recorded rank: nothing real around it."""
    return ranks.Spec(
        argv=launch.argv,
        cwd=launch.cwd,
        env=launch.env,
        world_size=len(launch.entropy),
        rank=rank,
        local_rank=rank % launch.nproc_per_node,
        node=rank // launch.nproc_per_node,
        nproc_per_node=launch.nproc_per_node,
        entropy=int(launch.entropy[rank]),
        sandbox=frozenset(),
        stop_after=launch.stop_after,
        announce=True,
        eager_sends=eager_sends,
        device=launch.device,
    )


def payload_path(output: str) -> str:
    """The payload store beside the graph: run.h5 → run.payload."""
    return str(Path(output).with_suffix(".payload"))


def check_writable(output: str) -> None:
    """PrismError now, rather than after the recording, if the result could not be written."""
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        raise PrismError(f"{output}: is a folder; name a file")
    if payload_path(output) == output:
        raise PrismError(f"{output}: is the name of the payload store; name the graph otherwise, such as run.h5")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PrismError(f"{output}: cannot write here: {error.strerror}") from error


class Pace:
    """Switches a second since the line before, and the time since the beginning."""

    def __init__(self) -> None:
        self._begun = self._then = time.monotonic()
        self._switches = 0

    def elapsed(self) -> float:
        """Seconds since the first rank was forked."""
        return time.monotonic() - self._begun

    def rate(self, switches: int) -> float:
        """Switches a second since the last call."""
        now, before = time.monotonic(), self._switches
        seconds, self._then, self._switches = now - self._then, now, switches
        return (switches - before) / max(seconds, 1e-9)


def show_progress(options: argparse.Namespace, coordinator: Coordinator, pace: Pace) -> None:
    """What the user should hear, and the moving line: of the rank that is furthest behind."""
    for text in coordinator.notices:
        options.progress.warn(text)
    coordinator.notices.clear()
    if not options.progress.due():
        return
    turns = coordinator.turns
    running = [turn.rank for turn in turns.values() if not turn.rank.left]
    behind = min((rank.iterations for rank in running), default=0)
    total = f"/{options.warmup + options.iterations}" if options.iterations else ""
    seconds = int(pace.elapsed())
    options.progress.update(
        f"iteration {behind + 1}{total}  ranks running {turns.active} blocked {len(running) - turns.active}  "
        f"switches {turns.switches:,} ({pace.rate(turns.switches):,.0f}/s)  "
        f"{seconds // 60}:{seconds % 60:02}"
    )


def _run(
    options: argparse.Namespace, coordinator: Coordinator, launch: Launch, rules: Rules | None, pace: Pace
) -> dict[int, Any]:
    """Run the ranks, all of them or one for many; returns the traces of all. PrismError: as for Coordinator.run."""

    def tick() -> None:
        show_progress(options, coordinator, pace)

    def spec_for(rank: int) -> ranks.Spec:
        spec = spec_of(launch, rank, options.sends == "eager")
        output = sys.stderr.fileno() if options.explain_rules else ranks.OURS  # stdout is the table's
        return replace(spec, rules=rules, lenient=options.explain_rules, output=output)

    specs = map(spec_for, range(options.world_size))
    if not isinstance(coordinator, Alone):
        for one in specs:
            coordinator.launch(one)
        coordinator.run(tick)
    elif not options.dedup:
        coordinator.run_all(specs, tick)
    else:
        replicas = Replicas(coordinator, spec_for, options.world_size, tick)
        replicas.run()
        options.progress.warn(summary(replicas, options.world_size, len(coordinator.ranks)))
        return replicas.traces()
    return traces_of(coordinator)


def traces_of(coordinator: Coordinator) -> dict[int, Any]:
    """What the ranks that ran have sent."""
    return {number: rank.trace for number, rank in coordinator.ranks.items() if rank.trace is not None}


def _write(
    options: argparse.Namespace,
    coordinator: Coordinator,
    launch: Launch,
    payload: Payload,
    traces: dict[int, Any],
    whole: bool = True,
) -> Graph:
    graph = build(traces, list(coordinator.groups.values()), launch, payload, coordinator.store.log, whole)
    provenance.append(graph, options.tool, options.argv)
    if len(coordinator.ranks) < len(traces):
        graph.ranks.ran = np.array([traces[rank].get("ran", rank) for rank in range(options.world_size)], np.int32)
    graph.payload.path = os.path.basename(payload.path)  # the two are in one folder
    file.write(graph, options.output)
    return graph


def _keep_partial(options: argparse.Namespace, coordinator: Coordinator, launch: Launch, problem: PrismError) -> None:
    """Save what is known of a recording that was given up; the problem's own message comes first."""
    coordinator.collect_traces()
    if os.path.exists(options.output):  # an older recording is worth more than this one
        options.output = str(Path(options.output).with_suffix(".partial.h5"))
    try:
        _write(options, coordinator, launch, Payload(), traces_of(coordinator), whole=False)
    except (PrismError, OSError) as error:
        problem.detail = (problem.detail + f"\nno partial graph: {error}").strip("\n")
        return
    problem.detail = (problem.detail + f"\npartial graph kept in {options.output} (incomplete)").strip("\n")
    if isinstance(problem, Failure):
        problem.status = problem.status or 1
