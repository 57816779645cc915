"""prism-record --live: runs the command as it is, with capture in every rank, and makes one graph of the ranks' shards."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from prism_tools.capture import shard
from prism_tools.capture.lanes import with_lanes
from prism_tools.capture.live import FOLDER, HOLD, STOP
from prism_tools.capture.server import Group
from prism_tools.capture.trace import LANES
from prism_tools.errors import PrismError
from prism_tools.gpu import stamp
from prism_tools.graph import file, provenance
from prism_tools.graph.iterations import iteration_times
from prism_tools.graph.model import Graph, Launch, Memory, Payload, Timing
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import UNKNOWN
from prism_tools.launch.program import allowed_environment
from prism_tools.record.build import build
from prism_tools.record.run import check_writable

PEAKS = ("rss", "allocated", "reserved")
TIMES = ("host_issue", "ready", "start", "end")


def record_live(options: argparse.Namespace) -> int:
    """Run ``options.command`` and write the graph; returns the command's exit status. PrismError: no trace, no space."""
    if shutil.which(options.command[0]) is None:
        raise PrismError(
            f"{options.command[0]}: no such command; give a launcher, such as torchrun or srun", status=127
        )
    check_writable(options.output)
    output = Path(options.output).absolute()
    folder = tempfile.mkdtemp(
        prefix=f".{output.name}.live-", dir=output.parent
    )  # beside it: every node can write there
    try:
        status = run_command(options.command, live_environment(folder, options))
        try:
            graph = live_graph(read_shards(folder), options)
        except PrismError as problem:
            if status:
                raise PrismError(f"the command ended with status {status}; {problem}", status=status) from None
            raise
        provenance.append(graph, options.tool, options.argv)
        file.write(graph, options.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def live_environment(folder: str, options: argparse.Namespace) -> dict[str, str]:
    """What switches capture on in the command's processes, wherever they run: the library lies beside the shards."""
    stop_after = options.warmup + options.iterations if options.iterations else 0
    added = {FOLDER: folder, STOP: str(stop_after), HOLD: str(max(options.warmup - 3, 0))}
    try:
        library = stamp.build()
    except PrismError as problem:
        if os.path.exists("/dev/nvidiactl"):
            raise
        options.progress.say(f"GPUs could not be traced: {problem}")
        return {**os.environ, **added}
    here = Path(folder) / library.name
    shutil.copy(library, here)
    usable = [str(path) for path in (here, library) if not set(" :") & set(str(path))]  # separators of LD_PRELOAD
    if not usable:
        raise PrismError(f"{here.parent.parent}: the output's folder has a space or colon in its name; choose another")
    added["LD_PRELOAD"] = " ".join(filter(None, [usable[0], os.environ.get("LD_PRELOAD", "")]))
    return {**os.environ, **added}


def run_command(command: list[str], environment: dict[str, str]) -> int:
    """Run it to its end; an interrupt goes to it first. 128+N if signal N ended it."""
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            status = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return status if status >= 0 else 128 - status


def read_shards(folder: str) -> dict[int, dict[str, Any]]:
    """The ranks' traces, nodes on all lanes. PrismError if there is none or some are missing."""
    found = [shard.read(path) for path in sorted(Path(folder).glob("*.shard"))]
    newest = max((trace["attempt"] for trace in found), default=0)  # torchrun may have started the job again
    shards = [trace for trace in found if trace["attempt"] == newest]
    if not shards:
        raise PrismError(
            "no rank left a trace: install prism-tools in the program's own Python, "
            "leave TORCH_DEVICE_BACKEND_AUTOLOAD as it is, and see that the program makes a process group"
        )
    traces = {trace["rank"]: trace for trace in shards}
    sizes = {trace["world_size"] for trace in shards}
    if len(sizes) > 1:
        raise PrismError(f"the command ran jobs of {' and '.join(map(str, sorted(sizes)))} ranks; trace one at a time")
    _check_one_job(shards)
    missing = set(range(sizes.pop())) - set(traces)
    if missing:
        raise PrismError(
            f"ranks {ranks_text(missing)} left no trace: they were killed, or another node cannot write here"
        )
    for rank, trace in sorted(traces.items()):
        if trace.get("refused"):
            raise PrismError(f"rank {rank}: {trace['refused']}")
        if "rows" in trace and not (trace["rows"]["kind"] == stamp.RECORD).any():
            raise PrismError(
                f"rank {rank}: no event of the backend was seen: this torch links the CUDA runtime statically"
            )
    return {rank: with_lanes(trace) if "rows" in trace else trace for rank, trace in sorted(traces.items())}


def _check_one_job(shards: list[dict[str, Any]]) -> None:
    """PrismError if tasks of one launcher do not know of each other: two were the same rank, or each was the only one."""
    rank, copies = Counter(trace["rank"] for trace in shards).most_common(1)[0]
    world = shards[0]["world_size"]
    launched = max(trace.get("tasks", 1) for trace in shards)
    if copies > 1 or world == 1 < launched:
        launcher = shards[0].get("launcher") or "the command"
        raise PrismError(
            f"{launcher} started {max(copies, launched if world == 1 else 0)} processes that were rank {rank} of {world} "
            "each and knew nothing of each other; start one job: with torchrun, with srun --mpi=pmi2, or with the mpiexec "
            "of the program's own MPI"
        )


def live_graph(traces: dict[int, dict[str, Any]], options: argparse.Namespace) -> Graph:
    """The graph of the ranks' traces, at stage "sliced": all of them are one slice."""
    lanes = _common_lanes(traces)
    graph = build(traces, _groups(traces), _launch(traces, options), Payload(), [], lanes=lanes)
    nodes = list(dict.fromkeys(trace["host"] for trace in traces.values()))
    graph.ranks.node = np.array([nodes.index(trace["host"]) for trace in traces.values()], np.int32)
    graph.ranks.local_rank = _places_on_nodes(graph.ranks.node)
    graph.timing = _timing(graph, traces)
    peaks = {name: np.array([trace[name] for trace in traces.values()], np.int64) for name in PEAKS}
    graph.memory = Memory(np.array(list(traces), np.int32), **peaks, stage=["live"] * len(traces))
    first = traces[0]
    graph.environment = {
        **graph.environment,
        **{name: first[name] for name in ("torch", "nccl", "device") if first[name]},
    }
    graph.stage = "sliced"
    return graph


def _places_on_nodes(node: np.ndarray) -> np.ndarray:
    """Each rank's place among the ranks of its node, in the order of ranks."""
    return np.array([int(np.sum(node[:rank] == node[rank])) for rank in range(len(node))], np.int32)


def _common_lanes(traces: dict[int, dict[str, Any]]) -> tuple[str, ...]:
    """One list of lanes for all ranks; their lane columns are changed to count in it."""
    names = dict.fromkeys(LANES)
    for trace in traces.values():
        names.update(dict.fromkeys(trace.get("lanes", LANES)))
    common = {name: number for number, name in enumerate(names)}
    for trace in traces.values():
        place = np.array([common[name] for name in trace.get("lanes", LANES)], np.int16)
        trace["columns"]["lane"] = place[trace["columns"]["lane"]]
    return tuple(common)


def _groups(traces: dict[int, dict[str, Any]]) -> list[Group]:
    found: dict[tuple[str, str, tuple[int, ...]], Group] = {}
    for trace in traces.values():
        for key, text in zip(trace["slots"], trace["descriptions"], strict=True):
            name, backend, members = key
            index = {rank: place for place, rank in enumerate(members)}
            found.setdefault(key, Group(len(found), name, text, backend, members, index))
    return list(found.values())


def _launch(traces: dict[int, dict[str, Any]], options: argparse.Namespace) -> Launch:
    first = traces[0]
    backends = {backend for trace in traces.values() for _, backend, _ in trace["slots"]}
    return Launch(
        argv=first["argv"],
        cwd=first["cwd"],
        env=allowed_environment(),
        python=first["python"],
        nproc_per_node=max(Counter(trace["host"] for trace in traces.values()).values()),
        device="cuda" if any("lanes" in trace for trace in traces.values()) else "cpu",
        backend=",".join(sorted(backends)) or "gloo",
        hash_seed=int(seed) if (seed := os.environ.get("PYTHONHASHSEED", "random")).isdecimal() else UNKNOWN,
        entropy=np.zeros(len(traces), np.uint64),  # nothing was seeded
        warmup=options.warmup,
        stop_after=options.warmup + options.iterations if options.iterations else UNKNOWN,
    )


def _timing(graph: Graph, traces: dict[int, dict[str, Any]]) -> Timing:
    """One row a rank. Machines that are not rank 0's have clocks of their own: their error is unknown."""
    ranks = np.array(list(traces), np.int32)
    zero = np.zeros(len(traces), np.int64)
    error = [
        trace.get("device_error", 0) if trace["boot"] == traces[0]["boot"] else UNKNOWN for trace in traces.values()
    ]
    columns: dict[str, Any] = {
        name: [trace["times"][:, k].copy() for trace in traces.values()] for k, name in enumerate(TIMES)
    }
    zero32 = zero.astype(np.int32)
    timing = Timing(ranks, zero32, zero32, zero, zero, np.array(error, np.int64), **columns)
    everything = range(graph.iterations())
    timing.iteration_ns = [
        iteration_times(graph.program_of(rank), timing.start[k], timing.end[k], everything)
        for k, rank in enumerate(ranks.tolist())
    ]
    return timing
