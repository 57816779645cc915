"""One recording, from the options to the file: fork server, coordinator, payloads, graph."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from prism_tools.capture import ranks
from prism_tools.capture.server import Failure
from prism_tools.errors import PrismError
from prism_tools.graph import file, provenance
from prism_tools.graph.model import Launch, Payload
from prism_tools.graph.schema import UNKNOWN
from prism_tools.launch.program import allowed_environment, check_program, fix_hash_seed
from prism_tools.record.build import build
from prism_tools.record.coordinator import Coordinator
from prism_tools.tensors.payload import PayloadWriter


def record(options: argparse.Namespace) -> int:
    """Record the program of ``options``; returns the exit status. PrismError: deadlock, mismatch, a failed rank, no space."""
    check_program(options.command)
    check_writable(options.output)
    launch = describe(options, fix_hash_seed())
    budget = options.tensor_budget if options.tensors == "all" else 0
    payloads = PayloadWriter(payload_path(options.output), budget)
    options.progress.log = options.verbose > 0 and not options.quiet
    coordinator = Coordinator(options.jobs, payloads)
    try:
        options.progress.say(f"{options.world_size} ranks, {options.jobs} at a time; payloads: {options.tensors}")
        ranks.preload()
        for rank in range(options.world_size):
            coordinator.launch(spec_of(launch, rank))
        pace = Pace()
        try:
            coordinator.run(lambda: show_progress(options, coordinator, pace))
        except PrismError as problem:
            _keep_partial(options, coordinator, launch, problem)
            raise
        payload = payloads.finish()
        _write(options, coordinator, launch, payload)
        payloads.commit()
        options.progress.say(
            f"{len(coordinator.ranks)} ranks recorded: {coordinator.switches:,} switches in {pace.elapsed():.1f} s"
        )
        if payload.mode == "partial":
            options.progress.warn(
                f"payloads beyond the budget were not kept ({payloads.lost:,} B); add --tensor-budget"
            )
    finally:
        coordinator.close()
        payloads.discard()
    return 0


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
        device="cpu",
        backend="gloo",
        hash_seed=hash_seed,
        entropy=entropy,
        warmup=options.warmup,
        stop_after=stop_after,
    )


def spec_of(launch: Launch, rank: int) -> ranks.Spec:
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
        """Seconds since the ranks began."""
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
    running = [turn.rank for turn in coordinator.turns.values() if not turn.rank.left]
    behind = min((rank.iterations for rank in running), default=0)
    total = f"/{options.warmup + options.iterations}" if options.iterations else ""
    seconds = int(pace.elapsed())
    options.progress.update(
        f"iteration {behind + 1}{total}  ranks running {coordinator.active} blocked {len(running) - coordinator.active}  "
        f"switches {coordinator.switches:,} ({pace.rate(coordinator.switches):,.0f}/s)  "
        f"{seconds // 60}:{seconds % 60:02}"
    )


def _write(
    options: argparse.Namespace, coordinator: Coordinator, launch: Launch, payload: Payload, whole: bool = True
) -> None:
    traces = {number: rank.trace for number, rank in coordinator.ranks.items() if rank.trace is not None}
    graph = build(traces, list(coordinator.groups.values()), launch, payload, coordinator.store.log, whole)
    provenance.append(graph, options.tool, options.argv)
    file.write(graph, options.output)


def _keep_partial(options: argparse.Namespace, coordinator: Coordinator, launch: Launch, problem: PrismError) -> None:
    """Save what is known of a recording that was given up; the problem's own message comes first."""
    coordinator.collect_traces()
    if os.path.exists(options.output):  # an older recording is worth more than this one
        options.output = str(Path(options.output).with_suffix(".partial.h5"))
    try:
        _write(options, coordinator, launch, Payload(), whole=False)
    except (PrismError, OSError) as error:
        problem.detail = (problem.detail + f"\nno partial graph: {error}").strip("\n")
        return
    problem.detail = (problem.detail + f"\npartial graph kept in {options.output} (incomplete)").strip("\n")
    if isinstance(problem, Failure):
        problem.status = problem.status or 1
