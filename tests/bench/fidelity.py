"""Fidelity: the real iteration time of a paced GPT, and what prism-calibrate and prism-replay say it is.

Real runs and tool runs take turns. Every figure is an error in percent of the mean of all real runs, held against the
larger of the goal and twice the A/A spread of the real runs. Null predictors must miss, or the benchmark proves nothing.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from figures import figure, progress
from real import run_real, step_times

from prism_tools.calibrate.nulls import own_spans_only, uncalibrated
from prism_tools.capture.ranks import threads_of_a_rank
from prism_tools.graph import file
from prism_tools.graph.iterations import counted
from prism_tools.graph.schema import HOST_LANE, Kind
from prism_tools.launch.program import fix_hash_seed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "share/prism/examples/gpt.py"
STEPS, WARMUP = 12, 2
REPEAT = 3  # runs of each slice: one run's spans differ from the next one's by about 1 %
GOAL_MEAN, GOAL_MAX = 0.3, 1.0  # percent
NULL_MISS = 5.0  # percent: what a predictor without calibration must at least be off by
# Percent. More CPU and cores are short; less waiting and there is nothing to predict. Ranks that queue for a core slow each
# other down as slices of fewer ranks cannot show.
CPU_LIMIT, WAITING, QUEUED = 30.0, 20.0, 2.0


@dataclass(frozen=True)
class Case:
    """One configuration: `size` ranks run for real in a slice, `sandbox` in the replay."""

    name: str
    world_size: int
    arguments: str
    size: int = 2
    sandbox: str = "0-1"

    def command(self):
        return [PROGRAM, *self.arguments.split(), "--steps", str(STEPS)]


CASES = (
    Case("w4", 4, "--pp 2 --pace 8"),
    Case("w8", 8, "--tp 2 --pp 2 --layers 2 --microbatches 2 --pace 40"),
    Case("w4-moe", 4, "--pp 2 --ep 2 --pace 8"),
)


@dataclass
class Measured:
    """What the tools say of one case, ms. `timer`: the program's own in the sandbox; `tool`: prism-replay's."""

    calibrate: float
    timer: float
    tool: float
    own_spans: float
    uncalibrated: float
    waiting: float  # share of the iteration that ranks communicate or wait
    late: int  # deliveries of the replay that came late


def tool(name, *arguments):
    """Run prism-`name`; returns what it and the program print. SystemExit if it fails."""
    command = [sys.executable, ROOT / "bin" / f"prism-{name}", "-q", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"bench: prism-{name} ended with status {done.returncode}")
    return done.stdout


def record(case, folder):
    """Record all ranks at a time: paced ranks sleep, so this is the quickest. Returns the graph's path."""
    bare = folder / f"{case.name}.bare.h5"
    tool("record", "-n", case.world_size, "-j", case.world_size, "--warmup", WARMUP, "-o", bare, "--", *case.command())
    return bare


def measure(case, folder, turn):
    """Record, slice, calibrate and replay `case` once."""
    sliced, calibrated, replayed = (folder / f"{case.name}.{turn}.{stage}.h5" for stage in ("s", "c", "r"))
    bare = record(case, folder)
    tool("slice", "run", bare, "-s", case.size, "--repeat", REPEAT, "-o", sliced)
    tool("calibrate", sliced, "-o", calibrated)
    text = tool("replay", "-r", case.sandbox, calibrated, "-o", replayed)
    graph = file.read(str(replayed))
    chosen = list(counted(graph))
    return Measured(
        calibrate=graph.timeline.iteration_time_ns / 1e6,
        timer=float(np.nanmean(step_times(text, case.world_size, STEPS)[:, WARMUP:])),
        tool=float(np.mean([times[chosen] for times in graph.replay.timing.iteration_ns])) / 1e6,
        own_spans=own_spans_only(graph) / 1e6,
        uncalibrated=uncalibrated(graph) / 1e6,
        waiting=waiting_share(graph),
        late=int(graph.replay.late[chosen].sum()),
    )


def waiting_share(graph):
    """Share of the counted iterations that the host lanes spend in anything but computing, mean over ranks."""
    shares = []
    for rank in range(graph.world_size):
        program, row = graph.program_of(rank), graph.timeline.row[rank]
        spans = graph.timeline.end[row] - graph.timeline.start[row]
        host = (program.lane == HOST_LANE) & np.isin(program.segment, list(counted(graph)))
        shares.append(1 - spans[host & (program.kind == Kind.COMPUTE)].sum() / spans[host].sum())
    return float(np.mean(shares))


def self_consistency(case, folder):
    """Slice the whole job at once and solve it: (solved, measured) iteration time, ms. The waits must come out again."""
    whole, solved = folder / f"{case.name}.whole.h5", folder / f"{case.name}.whole.c.h5"
    tool("slice", "run", folder / f"{case.name}.bare.h5", "-s", case.world_size, "-o", whole)
    tool("calibrate", whole, "-o", solved)
    graph = file.read(str(solved))
    return graph.timeline.iteration_time_ns / 1e6, uncalibrated(graph) / 1e6


def bench(case, folder, repeats):
    """Interleave `repeats` real runs with as many tool runs less one; print the case's figures.

    Returns the case's error by predictor and its A/A spread, percent.
    """
    real, tools = [], []
    for turn in range(repeats):
        progress(f"{case.name}: real run {turn + 1}/{repeats}")
        real.append(run_real(case.command(), case.world_size, STEPS, WARMUP))
        steps = real[-1].step_ms[:, WARMUP:]
        progress(f"{case.name}: {steps.mean():.2f} ms (median {np.median(steps):.2f})")
        if turn < repeats - 1 or repeats == 1:
            progress(f"{case.name}: record, slice, calibrate, replay {turn + 1}")
            tools.append(measure(case, folder, turn))
            progress(f"{case.name}: {tools[-1]}")
    means = np.array([run.step_ms[:, WARMUP:].mean() for run in real])
    truth = means.mean()
    spread = 100 * float(np.abs(means - truth).max() / truth)
    figure(f"{case.name} real iteration", float(truth), "ms")
    figure(f"{case.name} A/A (largest deviation of {repeats} real runs from their mean)", spread, "%")
    validity(case, real, tools)
    errors = {}
    for name, label in (("calibrate", "prism-calibrate"), ("timer", "replay, own timer"), ("tool", "replay, tool")):
        errors[name] = report_error(f"{case.name} error of {label}", [getattr(m, name) for m in tools], truth, spread)
    for name in ("own_spans", "uncalibrated"):
        miss = 100 * (np.mean([getattr(m, name) for m in tools]) / truth - 1)
        figure(f"{case.name} null predictor {name}", float(miss), "%", NULL_MISS, bool(abs(miss) >= NULL_MISS), spread)
    progress(f"{case.name}: whole-real slice")
    solved, measured = self_consistency(case, folder)
    off = 100 * (solved / measured - 1)
    figure(f"{case.name} self-consistency of a whole-real slice", off, "%", GOAL_MEAN, abs(off) <= GOAL_MEAN, spread)
    figure(f"{case.name} traced against untraced, all real", 100 * (measured / truth - 1), "%", baseline=spread)
    return errors, spread


def report_error(name, values, truth, spread):
    """Print and return the mean error of the tool runs, percent, with its sign."""
    error = 100 * float(np.mean(values) / truth - 1)
    allowed = max(GOAL_MAX, 2 * spread)
    figure(name, error, "%", allowed, abs(error) <= allowed, spread)
    return error


def validity(case, real, tools):
    """What must hold for the comparison to mean something."""
    cpu = 100 * max(run.cpu_share() for run in real)
    figure(f"{case.name} CPU of the real run, of all cores", cpu, "%", CPU_LIMIT, cpu < CPU_LIMIT)
    queued = 100 * float(np.mean([run.queued_share() for run in real]))
    figure(f"{case.name} ready but without a core, of an iteration", queued, "%", QUEUED, queued < QUEUED)
    waiting = 100 * float(np.mean([m.waiting for m in tools]))
    figure(f"{case.name} communication and waiting, of an iteration", waiting, "%", WAITING, waiting >= WAITING)
    figure(f"{case.name} late deliveries of a replay", float(np.mean([m.late for m in tools])), "deliveries")


def overall(results):
    """Mean and maximum over the cases, by predictor; each case's error may be as large as its own A/A spread allows."""
    spreads = np.array([spread for _, spread in results])
    for name in results[0][0]:
        errors = np.abs([errors[name] for errors, _ in results])
        worst = int(np.argmax(errors / np.maximum(GOAL_MAX, 2 * spreads)))
        for kind, value, goal, spread in (
            ("mean", errors.mean(), GOAL_MEAN, spreads.mean()),
            ("max", errors[worst], GOAL_MAX, spreads[worst]),
        ):
            allowed = max(goal, 2 * float(spread))
            figure(f"{kind} |error| of {name}", float(value), "%", allowed, bool(value <= allowed), float(spread))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, action="append", help="this configuration (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="real runs of each (default: 3)")
    parser.add_argument("--keep", metavar="DIR", help="keep the graphs here")
    options = parser.parse_args()
    fix_hash_seed()
    threads_of_a_rank()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        chosen = [case for case in CASES if case.name in (options.only or names)]
        overall([bench(case, folder, options.repeats) for case in chosen])


if __name__ == "__main__":
    main()
