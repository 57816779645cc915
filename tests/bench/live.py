"""Live tracing: what it costs, whether a live graph gives back its own times, and what it says that delays would do.

For each mode of live_gpt.py, untraced runs of the program (the A/A) take turns with a traced one and a profiled one. All of
them have the same delays, so that one traced run serves all three questions. Other modes than --cost are traced only.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
from figures import figure, progress
from live_model import Live, Prediction, consistency, delay_classes, tracing_cost, unexplained, with_tracing_cost

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests/bench/live_gpt.py"
MODES = ("ddp", "fsdp", "tp", "1f1b", "interleaved", "3d", "moe", "hostbound", "ddp-quiet", "fsdp-quiet", "1f1b-quiet")
LAYERS = {"cuda": 24, "cpu": 4}
STAGES = {"1f1b": 1, "interleaved": 2}  # of a rank
HALVES = "3d"  # two stages, whatever the world
DELAY_MS = {"cuda": 5.0, "cpu": 20.0}
HOST_BOUND_MS = 25.0  # where the host's own pace varies by 10 ms
RESULT = re.compile(r"RES (\{[^\n]*\})")
GOAL = 1.0  # percent of an iteration
SHOWN = 15  # lines of the log of a run that failed


class Report:
    """Prints every figure, and keeps it for the tables of results.md."""

    def __init__(self):
        self.tables = {}  # title -> row -> column -> text
        self.facts = {}

    def add(self, table, row, column, value, unit, goal=None, spread=None):
        """A figure held against `goal`, or twice the A/A `spread` where that is larger; read beside the spread."""
        allowed = None if goal is None else max(goal, 2 * (spread or 0))
        ok = None if allowed is None else bool(abs(value) <= allowed)
        figure(f"{row} {column}", value, unit, allowed, ok, spread)
        text = f"{value:.0f}" if unit in ("bytes", "ns") else f"{value:.3f}"
        shown = f"{text} {unit}" + (" (!)" if ok is False else "")
        self.tables.setdefault(table, {}).setdefault(row, {})[column] = shown

    def write(self, path):
        lines = ["# Live tracing", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
        lines += ["- (!): misses its goal, or twice the A/A (of a delay: its standard error) where that is larger"]
        for title, rows in self.tables.items():
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            lines += ["", f"## {title}", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
            for name, row in rows.items():
                lines.append("| " + " | ".join([name, *(row.get(column, "–") for column in columns)]) + " |")
        path.write_text("\n".join(lines) + "\n")


class Bench:
    """One mode: its command, its runs and their logs."""

    def __init__(self, name, options, folder):
        self.name, self.options, self.folder = name, options, folder
        self.mode, _, quiet = name.partition("-")
        self.quiet = bool(quiet)
        self.delay = delays(self.mode, options)
        self.classes = delay_classes(self.delay)

    def program(self, *more):
        options = self.options
        words = ["--mode", self.mode, "--device", options.device, "--steps", options.steps, "--delay", self.delay]
        words += ["--limit", options.limit, *(["--quiet"] if self.quiet else [])]
        words += [*(["--layers", options.layers] if options.layers else []), *options.extra.split(), *more]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]  # of this Python, whatever PATH says
        return [*torchrun, "--standalone", "--nproc-per-node", options.world, PROGRAM, *words]

    def run(self, kind, turn=0):
        """Run the program "untraced", "traced" or "profiled"; returns its RES lines by rank, kept ones if there are any."""
        kept = self.folder / f"{self.name}.{kind}.{turn}.json"
        if kept.exists():
            return {result["rank"]: result for result in json.loads(kept.read_text())}
        progress(f"{self.name}: {kind} run {turn + 1}")
        command = self.program(*(["--profile"] if kind == "profiled" else []))
        if kind == "traced":
            tracer = [sys.executable, ROOT / "bin" / "prism-record", "-q", "--live", "--warmup", self.options.warmup]
            tracer += ["--iterations", self.options.steps - self.options.warmup]  # room for events is made once
            command = [*tracer, "-o", self.graph(), "--", *command]
        log = self.folder / f"{self.name}.{kind}.{turn}.log"
        began = time.monotonic()
        text = run_limited(list(map(str, command)), log, self.options.limit + 60)
        found = {result["rank"]: result for result in map(json.loads, RESULT.findall(text))}
        if len(found) < self.options.world:
            raise RuntimeError(f"{kind} run: ranks {sorted(found)} of {self.options.world} gave a result; see {log}")
        step = self.step_ms(found)
        progress(f"{self.name}: {kind} {step:.3f} ms a step, {time.monotonic() - began:.0f} s in all")
        kept.write_text(json.dumps(list(found.values())))
        return found

    def graph(self):
        return self.folder / f"{self.name}.live.h5"

    def step_ms(self, found):
        """What stands for a run: the mean over ranks of its typical step."""
        return float(np.mean([self.typical(result["step_ms"]) for result in found.values()]))

    def typical(self, times):
        """Mean over the delay classes of their median after warm-up; `times` begins with the first iteration."""
        times = np.array(times, float)
        usable = np.arange(len(times)) >= max(1, self.options.warmup)
        kind = np.arange(len(times)) % len(self.classes)
        return float(np.mean([np.median(times[usable & (kind == j)]) for j in range(len(self.classes))]))


def delays(mode, options):
    """One delayed rank, two that may or may not hide each other's, and one delayed host."""
    layers, ms = options.layers or LAYERS[options.device], options.delay_ms or DELAY_MS[options.device]
    ms = HOST_BOUND_MS if mode == "hostbound" and options.device == "cuda" else ms
    early, late = 3 * layers // 4, layers // 4  # in backward
    last = options.world - 1
    if mode in STAGES or mode == HALVES:
        count, second = (
            (STAGES[mode] * options.world, last) if mode in STAGES else (2, 1)
        )  # stages, one of the last rank
        early, late = (layers * (2 * stage + 1) // (2 * count) for stage in (0, second))
    first, second = f"0:{early}:{ms:g}:gpu", f"{last}:{late}:{ms:g}"
    return f"{first}+{first},{second}:gpu+{second}:host"


def run_limited(command, log, limit):
    """Standard output of `command`; its standard error goes to `log`, whose end is shown if it fails."""
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            text, _ = process.communicate(timeout=limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode:
        print("\n".join(log.read_text().splitlines()[-SHOWN:]), file=sys.stderr)
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}; see {log}")
    return text


def measure(bench, report):
    """All runs of a mode, and every figure."""
    untraced = []
    turns = bench.options.repeats if bench.name in bench.options.cost.split(",") else 0
    for turn in range(max(turns - 1, 0)):
        untraced.append(bench.run("untraced", turn))
    traced = bench.run("traced")
    profiled = None
    if turns:
        untraced.append(bench.run("untraced", turns - 1))
        profiled = bench.run("profiled")
    note_facts(report, traced)
    if bench.options.runs_only:
        return
    spread = overhead(bench, report, untraced, traced, profiled) if untraced else None
    live = Live(bench.graph())
    self_consistency(bench, report, live, spread, untraced)
    predict(bench, report, live)


def note_facts(report, found):
    first = found[0]
    report.facts |= {"card": f"{len(found)} x {first['card']}", "torch": first["torch"], "NCCL": first["nccl"] or "–"}


def overhead(bench, report, untraced, traced, profiled):
    """The A/A first: the largest deviation of an untraced run from their mean, which is returned in percent."""
    table, steps = "What tracing costs", np.array([bench.step_ms(found) for found in untraced])
    base = float(steps.mean())
    spread = 100 * float(np.abs(steps - base).max() / base)
    report.add(table, bench.name, "A/A", spread, "%", GOAL)
    report.add(table, bench.name, "untraced step", base, "ms")
    report.add(table, bench.name, "traced", 100 * (bench.step_ms(traced) / base - 1), "%", GOAL, spread)
    report.add(table, bench.name, "profiler", 100 * (bench.step_ms(profiled) / base - 1), "%", spread=spread)
    more = max(traced[rank]["peak_bytes"] - untraced[0][rank]["peak_bytes"] for rank in traced)
    on_gpu = bench.options.device == "cuda"
    report.add(table, bench.name, "peak memory, traced less untraced", more, "bytes", 0 if on_gpu else None)
    losses = [sum(run[rank]["loss"] != untraced[0][rank]["loss"] for rank in run) for run in (*untraced, traced)]
    report.add(table, bench.name, "ranks whose last loss differs, untraced", float(max(losses[:-1])), "ranks")
    report.add(table, bench.name, "ranks whose last loss differs, traced", float(losses[-1]), "ranks")
    return spread


def self_consistency(bench, report, live, spread, untraced):
    """Solve the graph with its own durations: with tracing's cost against the traced run, without against the program."""
    table, name = "Self-consistency", bench.name
    each, operations, spent = tracing_cost(live)
    if bench.mode != "hostbound":
        spent = each * operations
    cost, iteration = "What tracing costs", float(np.median(live.iteration_ns(live.end)[live.chosen]))
    report.add(cost, name, "a traced operation, lower quartile", each, "ns")
    report.add(cost, name, "traced operations of a rank and iteration", operations, "operations")
    report.add(cost, name, "both, of an iteration", 100 * spent / iteration, "%", GOAL)
    for what, value in consistency(live, *with_tracing_cost(live)).items():
        strict = "largest" in what and "host" not in what
        report.add(table, name, what, value, "%", GOAL if strict else None, spread)
    report.add(table, name, "waits that no edge explains", unexplained(live), "%", GOAL)
    plain = consistency(live, live.durations)
    report.add(table, name, "plain solve: iteration, mean error", plain["iteration, mean error"], "%", spread=spread)
    if untraced:
        program = np.mean([bench.step_ms(found) for found in untraced])
        solved = bench.typical(live.iteration_ns(live.solve(live.durations)[1])) / 1e6
        off = 100 * float(solved / program - 1)
        report.add(table, name, "plain solve against untraced steps", off, "%", GOAL, spread)


def predict(bench, report, live):
    """What the delays did, and what a model of the undelayed iterations says that they would do."""
    model = Prediction(live, bench.classes)
    table = "Prediction of delays: errors in percent of an undelayed iteration"
    progress(f"{bench.name}: {model.dropped()} of {len(live.chosen)} counted iterations are another program")
    base, effect = model.measured
    error, found = model.error(), model.predictions()
    for j in range(1, len(bench.classes)):
        row = f"{bench.name} class {j}"
        report.add(table, row, "undelayed", base / 1e6, "ms")
        told = " ".join(f"{d.rank}:{d.layer}:{d.ms:g}:{d.where}" for d in bench.classes[j])
        report.tables[table][row]["rank:layer:ms:where"] = told
        report.add(table, row, "measured effect", float(effect[j]) / 1e6, "ms")
        report.add(table, row, "its standard error", float(error[j]) / 1e6, "ms")
        grown = [growth / 1e6 for _, _, growth, _ in model.places[j]]
        report.tables[table][row]["delayed spans grew"] = " ".join(f"{growth:.3f}" for growth in grown) + " ms"
        for name, effects in found.items():
            goal = GOAL if name in ("as given", "as measured") else None
            report.add(table, row, name, 100 * float(effects[j] - effect[j]) / base, "%", goal, 100 * error[j] / base)


def facts(options):
    """What every table must say; more comes from the first run."""
    found = {"date": time.strftime("%Y-%m-%d"), "ranks": options.world, "steps": options.steps}
    kept = Path(options.out or "") / "facts.json"
    if options.out and kept.exists():
        return json.loads(kept.read_text())
    if options.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.split("\n")[0]
    if options.out:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    on_gpu = shutil.which("nvidia-smi") is not None
    add("--world", type=int, default=2, help="ranks, one a device (default: 2)")
    add("--modes", default=",".join(MODES), help=f"of {','.join(MODES)} (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu")
    add("--out", metavar="DIR", help="keep results.md, graphs and logs here")
    add("--steps", type=int, default=44, help="steps of every run (default: 44)")
    add(
        "--warmup",
        type=int,
        default=12,
        help="steps that do not count (default: 12: DDP looks at itself in the first 10)",
    )
    add("--cost", default="ddp,fsdp,hostbound", help="modes that also run untraced and profiled (default: %(default)s)")
    add(
        "--runs-only", action="store_true", help="leave the figures to a later call with the same --out, on any machine"
    )
    add("--repeats", type=int, default=2, help="untraced runs of each of these (default: 2)")
    add("--layers", type=int, help="layers of the model (default: live_gpt.py's)")
    add("--delay-ms", type=float, help="each delay (default: 5 on cuda, 20 on cpu)")
    add("--limit", type=float, default=120, help="seconds that a run may take (default: 120)")
    add("--extra", default="", metavar="WORDS", help="more options of live_gpt.py, in one word")
    options = parser.parse_args()
    unknown = set(options.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"no mode {', '.join(sorted(unknown))}")
    return options


def main():
    options = parse_args()
    report, failed = Report(), []
    report.facts = facts(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.out or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.modes.split(","):
            try:
                measure(Bench(name, options, folder), report)
            except Exception:  # one mode's failure must not cost the others their figures
                traceback.print_exc()
                progress(f"{name}: failed")
                failed.append(name)
            report.write(folder / "results.md")
    return f"bench: failed: {', '.join(failed)}" if failed else 0


if __name__ == "__main__":
    sys.exit(main())
