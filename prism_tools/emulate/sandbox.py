"""Running sandbox ranks beside an assistant, and their times as rows of the graph."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from prism_tools.capture import ranks
from prism_tools.capture.nodes import Nodes
from prism_tools.emulate.assistant import Assistant
from prism_tools.emulate.planner import AtOnce, Timed
from prism_tools.errors import PrismError
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph, Memory, Timing
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import UNKNOWN
from prism_tools.tensors.cut import crossing
from prism_tools.tensors.payload import PayloadReader

TIMES = ("host_issue", "ready", "start", "end")


def open_payloads(graph: Graph, file: str) -> PayloadReader | None:
    """The recorded payloads, looked for beside the graph's ``file`` first; None if none were kept."""
    folder = "" if file == "-" else os.path.dirname(os.path.abspath(file))
    return PayloadReader(graph.payload, folder, graph.ranks.ran) if graph.payload.uuid else None


def check_kept(graph: Graph, matches: Matches, payloads: PayloadReader | None, sandbox: list[int], file: str) -> None:
    """PrismError if payloads that cross into ``sandbox`` were left out, because those of other ranks were asked for."""
    _, asked, cut = graph.payload.mode.partition("cut=")
    if payloads is None or not asked:
        return
    for rank, node in crossing(graph, matches, sandbox):
        if payloads.entry(rank, node) is None and graph.values_of(rank).bytes[node]:
            remedy = f"replay exactly these, or record again with --tensors cut={ranks_text(sandbox)}"
            raise PrismError(f"{file_name(file)}: payloads were kept for ranks {cut} only; {remedy}")


def check_ranks(graph: Graph, chosen: list[int], file: str) -> None:
    """PrismError, naming the file, unless it has all these ranks."""
    try:
        for rank in chosen:
            graph.check_rank(rank)
    except PrismError as error:
        raise PrismError(f"{file_name(file)}: {error}") from None


def file_name(file: str) -> str:
    """A graph's file as messages name it."""
    return "standard input" if file == "-" else file


def check_hash_seed(graph: Graph) -> None:
    """PrismError unless str hashes are what they were in the recording; those of a live job are each rank's own."""
    if graph.launch.hash_seed != UNKNOWN and os.environ.get("PYTHONHASHSEED") != str(graph.launch.hash_seed):
        raise PrismError(
            f"the program was recorded with another hash seed; set PYTHONHASHSEED={graph.launch.hash_seed}"
        )


def run_sandbox(
    graph: Graph,
    matches: Matches,
    sandbox: list[int],
    planner: AtOnce | Timed,
    payloads: PayloadReader | None,
    nodes: Nodes | None,
    output: int,
    tick: Callable[[], None] = lambda: None,
    issue_cost: dict[int, int] | None = None,
) -> tuple[dict[int, dict[str, Any]], Assistant]:
    """Run the program for real on the ranks ``sandbox``, here or on ``nodes``; ``output``: see ranks.Spec; ``issue_cost``: see
    capture/session.py.

    Returns each rank's trace and the assistant. Nothing of the run is left when this returns or raises.
    """
    if len(sandbox) < graph.world_size and not graph.store.key and not graph.payload.uuid:
        remedy = f"record the program with prism-record -n {graph.world_size}"
        raise PrismError(f"the graph of a live job holds no values for virtual ranks to send; {remedy}")
    if payloads is not None:
        prefetch(graph, matches, payloads, sandbox, sandbox if nodes is None else nodes.near(sandbox))
    assistant = Assistant(graph, matches, sandbox, planner, payloads, nodes)
    sys.stdout.flush()
    gc.collect()
    gc.disable()  # a collection would make deliveries late
    try:
        return assistant.run([spec_of(graph, rank, sandbox, output, issue_cost) for rank in sandbox], tick), assistant
    finally:
        gc.enable()
        assistant.close()


def prefetch(graph: Graph, matches: Matches, payloads: PayloadReader, sandbox: list[int], near: list[int]) -> None:
    """Hold ready what the ranks ``near``, of the sandbox, receive from outside."""
    inside = set(sandbox)
    payloads.load(place for place in crossing(graph, matches, near) if place[0] not in inside)


def spec_of(graph: Graph, rank: int, sandbox: list[int], output: int, issue_cost: dict[int, int] | None) -> ranks.Spec:
    """A sandbox rank, as it was recorded."""
    launch = graph.launch
    return ranks.Spec(
        argv=launch.argv,
        cwd=launch.cwd,
        env=launch.env,
        world_size=graph.world_size,
        rank=rank,
        local_rank=int(graph.ranks.local_rank[rank]),
        node=int(graph.ranks.node[rank]),
        nproc_per_node=launch.nproc_per_node,
        entropy=int(launch.entropy[rank]),
        sandbox=frozenset(sandbox),
        stop_after=launch.stop_after,
        announce=False,
        output=output,
        issue_cost=issue_cost,
        device=launch.device,
    )


def timing(rows: list[tuple[int, int, int, dict[str, Any]]]) -> Timing:
    """Timing of (rank, slice, repeat, trace) rows, each on its own machine's clock."""
    keys: list[Any] = [np.array([row[k] for row in rows], np.int32) for k in range(3)]
    clocks: list[Any] = [
        np.array([getattr(row[3]["clock"], name) for row in rows], np.int64) for name in ("offset", "drift", "error")
    ]
    columns: dict[str, Any] = {name: [row[3]["times"][:, k].copy() for row in rows] for k, name in enumerate(TIMES)}
    return Timing(*keys, *clocks, **columns)


def joined_timing(old: Timing, new: Timing) -> Timing:
    """Rows of both."""
    columns: dict[str, Any] = {}
    for name in Timing.__dataclass_fields__:
        a, b = getattr(old, name), getattr(new, name)
        columns[name] = a + b if isinstance(a, list) else np.concatenate([a, b])
    return Timing(**columns)


def memory(stage: str, traces: dict[int, dict[str, Any]]) -> Memory:
    """Peak memory of the traced processes."""
    numbers = sorted(traces)
    rss = np.array([traces[number]["rss"] for number in numbers], np.int64)
    none = np.full(len(numbers), UNKNOWN, np.int64)
    return Memory(np.array(numbers, np.int32), rss, none, none, [stage] * len(numbers))


def joined_memory(old: Memory | None, new: Memory) -> Memory:
    """The newer peak where a rank has two of the same stage."""
    if old is None:
        return new
    fresh = set(zip(new.rank.tolist(), new.stage, strict=True))
    keep = [k for k, key in enumerate(zip(old.rank.tolist(), old.stage, strict=True)) if key not in fresh]
    columns = {
        name: np.concatenate([getattr(old, name)[keep], getattr(new, name)])
        for name in ("rank", "rss", "allocated", "reserved")
    }
    return Memory(**columns, stage=[old.stage[k] for k in keep] + new.stage)
