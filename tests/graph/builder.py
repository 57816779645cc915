"""Small graphs for tests, written the way a program reads.

    graph = build(2, {"world": [0, 1]}, lambda rank: [
        compute(), comm("all_reduce", "world", 4096, name="a", is_async=True),
        compute(), wait("a"), compute(), step()])

Each rank's list becomes its nodes, one to one and in order: host nodes on lane 0, asynchronous communication on lane 1
("gloo") with its issue edge from the host node before it, waits with an edge from each communication they name.
Groups, peers and roots are given as global ranks. Ranks with equal nodes share a program, with equal values the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass

import numpy as np

from prism_tools.graph.model import (
    Durations,
    Graph,
    Groups,
    Launch,
    Memory,
    Payload,
    Probes,
    Program,
    Ragged,
    Ranks,
    Replay,
    Steady,
    StoreLog,
    Timeline,
    Timing,
    Values,
)
from prism_tools.graph.schema import DTYPES, NODE_COLUMNS, Kind, Op, Reduce, Source
from prism_tools.graph.segments import find_segments


@dataclass
class Node:
    """One node of a rank, in global ranks and group names; made by compute, comm, wait and step."""

    kind: Kind
    op: Op = Op.NONE
    group: str = ""
    bytes: int = 0
    peer: int = -1
    root: int = -1
    tag: int = 0
    is_async: bool = False
    name: str = ""
    waits: tuple[str, ...] = ()
    dtype: str = ""
    reduce: Reduce = Reduce.NONE
    splits: tuple[int, ...] = ()
    batch: int = -1
    at: str = ""


def compute() -> Node:
    """Host work between two events."""
    return Node(Kind.COMPUTE)


def comm(op: str, group: str, nbytes: int = 0, **more: object) -> Node:
    """A communication: ``op`` as in Op, lower case. ``more``: other fields of Node: peer, root, is_async, name …"""
    number = Op[op.upper()]
    reduces = number in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
    defaults: dict = {"dtype": "float32", "reduce": Reduce.SUM if reduces else Reduce.NONE, "at": f"train.py:1 {op}"}
    return Node(Kind.COMM, number, group, nbytes, **(defaults | more))


def wait(*names: str, at: str = "train.py:2 wait") -> Node:
    """The host waits for the communications called ``names``."""
    return Node(Kind.WAIT, waits=names, at=at)


def step(at: str = "train.py:9 step") -> Node:
    """An optimizer step."""
    return Node(Kind.MARK, Op.OPTIMIZER_STEP, at=at)


def build(
    world_size: int,
    groups: dict[str, list[int]],
    nodes_of: Callable[[int], list[Node]],
    backend: str = "gloo",
) -> Graph:
    """A bare graph of ``world_size`` ranks: ``groups`` maps names to global ranks, ``nodes_of(rank)`` lists nodes."""
    strings: list[str] = []
    programs: dict[bytes, tuple[int, Program]] = {}
    values: dict[bytes, tuple[int, Values]] = {}
    program_of, values_of, slots = [], [], []
    for rank in range(world_size):
        mine = [name for name, members in groups.items() if rank in members]
        nodes = nodes_of(rank)
        program = _program(rank, nodes, groups, mine, strings)
        value = _values(nodes)
        program_key = b"|".join(column.tobytes() for column in [*program.columns.values(), program.edges])
        value_key = b"|".join(a.tobytes() for a in [*value.columns.values(), value.splits.offset, value.splits.data])
        program_of.append(programs.setdefault(program_key, (len(programs), program))[0])
        values_of.append(values.setdefault(value_key, (len(values), value))[0])
        slots.append([list(groups).index(name) for name in mine])
    everyone = np.arange(world_size, dtype=np.int32)
    return Graph(
        stage="bare",
        world_size=world_size,
        launch=launch(world_size, backend),
        groups=Groups(
            list(groups),
            [f"{name} desc" for name in groups],
            [backend] * len(groups),
            Ragged.from_rows(list(groups.values()), np.int32),
        ),
        programs=[program for _, program in programs.values()],
        values=[value for _, value in values.values()],
        ranks=Ranks(
            np.array(program_of, np.int32),
            np.array(values_of, np.int32),
            everyone,
            everyone * 0,
            Ragged.from_rows(slots, np.int32),
        ),
        lanes=["host", "gloo" if backend == "gloo" else "nccl:world"],
        strings=strings,
        store=StoreLog(np.empty(0, np.int32), [], [], []),
        payload=Payload(),
    )


def train4() -> Graph:
    """Four ranks, TP pairs (0,1) (2,3) and DP pairs (0,2) (1,3), two iterations with every feature of the format."""
    groups = {"world": [0, 1, 2, 3], "tp0": [0, 1], "tp1": [2, 3], "dp0": [0, 2], "dp1": [1, 3]}

    def nodes(rank: int) -> list[Node]:
        tp, dp = f"tp{rank // 2}", f"dp{rank % 2}"
        peer = rank ^ 1
        iteration = [
            compute(),
            comm("all_reduce", tp, 4096, at="train.py:5 forward"),
            compute(),
            comm("all_to_all", tp, 96, splits=(32, 64, 32, 64) if rank % 2 == 0 else (64, 32, 64, 32)),
            compute(),
            comm("send", tp, 8, peer=peer, is_async=True, name="s", batch=0, tag=3),
            comm("recv", tp, peer=peer, is_async=True, name="r", batch=0, tag=3),
            wait("s", "r"),
            compute(),
            comm("all_reduce", dp, 1 << 20, is_async=True, name="grad", dtype="bfloat16", at="train.py:7 backward"),
            compute(),
            wait("grad"),
            compute(),
            step(),
        ]
        start = [compute(), comm("broadcast", "world", 64, root=0, at="train.py:3 main"), compute()]
        return start + iteration * 2 + [compute(), comm("barrier", "world", dtype="", at="train.py:11 main"), compute()]

    return build(4, groups, nodes)


def launch(world_size: int, backend: str = "gloo") -> Launch:
    """How the imaginary train.py was run."""
    return Launch(
        argv=["train.py", "--tp", "2"],
        cwd="/home/u",
        env={"OMP_NUM_THREADS": "1"},
        python="/usr/bin/python3",
        nproc_per_node=world_size,
        device="cpu",
        backend=backend,
        hash_seed=7,
        entropy=np.arange(world_size, dtype=np.uint64) + np.uint64(2**63),
        warmup=1,
        stop_after=-1,
    )


def add_timing(graph: Graph, times: dict[int, list[tuple[int, int, int, int]]], slice_id: int = 0) -> None:
    """Append one measured row a rank: ``times[rank]`` lists (host_issue, ready, start, end) of each of its nodes."""
    old = graph.timing
    rows = [np.array(times[rank], np.int64).reshape(-1, 4) for rank in times]
    zero = np.zeros(len(rows), np.int64)
    rank = np.array(list(times), np.int32)
    lists = [[row[:, k].copy() for row in rows] for k in range(4)]
    iteration = [np.empty(0, np.int64) for _ in rows]
    if old is None:
        small = rank * 0
        graph.timing = Timing(rank, small + slice_id, small, zero, zero, zero, *lists, iteration)
        return
    seen = np.array([int(np.sum((old.rank == r) & (old.slice == slice_id))) for r in rank], np.int32)
    graph.timing = Timing(
        np.concatenate([old.rank, rank]),
        np.concatenate([old.slice, rank * 0 + slice_id]),
        np.concatenate([old.repeat, seen]),
        *(np.concatenate([a, zero]) for a in (old.clock_offset, old.clock_drift, old.clock_error)),
        *(a + b for a, b in zip((old.host_issue, old.ready, old.start, old.end), lists, strict=True)),
        old.iteration_ns + iteration,
    )


def add_results(graph: Graph) -> None:
    """Give ``graph`` every optional part, with made-up values that satisfy prism_tools.graph.check."""
    lengths = [len(graph.program_of(rank)) for rank in range(graph.world_size)]
    ends = [np.arange(1, n + 1, dtype=np.int64) * 1000 for n in lengths]
    add_timing(graph, {r: [(t - 900, t - 900, t - 900, t) for t in ends[r].tolist()] for r in range(graph.world_size)})
    rows = np.arange(graph.world_size, dtype=np.int32)
    two = np.array([1, 2])
    graph.probes = Probes(
        op=np.array([Op.ALL_REDUCE, Op.BARRIER], np.uint8),
        dtype=np.array([0, -1], np.int16),
        reduce=np.array([Reduce.SUM, Reduce.NONE], np.uint8),
        size=two.astype(np.int32) * 2,
        bytes=np.array([4096, 0], np.int64),
        duration=two * 700,
        spread=two * 7,
        repeats=two.astype(np.int32) * 5,
        tails=[np.array([0, 30], np.int64), np.array([0, 1, 2, 3], np.int64)],
        issue=[np.array([9, 8], np.int64), np.array([7, 6, 5, 4], np.int64)],
    )
    graph.memory = Memory(rows[:2], two * 2**30, two * 2**20, two * 2**21, ["slice", "replay"])
    graph.durations = Durations(
        rows,
        [np.full(n, 100, np.int64) for n in lengths],
        [np.full(n, 3, np.int64) for n in lengths],
        [np.full(n, 9, np.int64) for n in lengths],
        [np.full(n, 2, np.int64) for n in lengths],
        [np.full(n, Source.REAL, np.uint8) for n in lengths],
    )
    # All ranks in step: node k starts at k * 1000 and ends just before k + 1 does; waits go unnoticed.
    graph.timeline = Timeline(
        rows,
        [end - 1000 for end in ends],
        ends,
        np.array([8000], np.int64),
        8000,
        40,
        np.array([[0, 0], [graph.world_size - 1, lengths[-1] - 1]]),
    )
    graph.steady = Steady("", 16001, 2, 3, 2, 1000, np.array([[0, 0], [0, 1]]))
    timing = graph.timing
    assert timing is not None
    graph.replay = Replay(timing, np.array([0, 2]), np.array([0, 900]), np.array([True, False]), 2, 1)
    graph.payload = Payload("9b2c", "/scratch/run.payload", "all", 123456)
    graph.store = StoreLog(rows[:2], ["set", "add"], ["k/0", "n"], [b"\x00\xff", b""])
    graph.provenance = [
        {"id": "prism-record", "prev": "", "tool": "prism-record", "version": "0.1.0", "argv": "a 'b c'"}
    ]
    graph.environment = {"host": "n1", "cores": 2, "devices": ["cpu"]}
    graph.stage = "replayed"


def differences(a: object, b: object, path: str = "graph") -> list[str]:
    """Where two graphs (or parts of them) differ in value, type of array, or shape; empty if nowhere."""
    if is_dataclass(a) and type(a) is type(b):
        names = [field.name for field in fields(a)]
        return [line for name in names for line in differences(getattr(a, name), getattr(b, name), f"{path}.{name}")]
    if isinstance(a, np.ndarray):
        same = isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
        return [] if same else [f"{path}: {a!r} != {b!r}"]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in differences(a[key], b[key], f"{path}[{key!r}]")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [line for k, pair in enumerate(zip(a, b, strict=True)) for line in differences(*pair, f"{path}[{k}]")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} != {b!r}"]


def _program(rank: int, nodes: list[Node], groups: dict, mine: list[str], strings: list[str]) -> Program:
    columns = {name: np.full(len(nodes), -1 if dtype[0] == "i" else 0, dtype) for name, dtype in NODE_COLUMNS.items()}
    edges, host, named = [], -1, {}
    for i, node in enumerate(nodes):
        columns["kind"][i], columns["op"][i], columns["reduce"][i] = node.kind, node.op, node.reduce
        columns["lane"][i], columns["batch"][i] = int(node.is_async), node.batch
        columns["dtype"][i] = DTYPES.index(node.dtype) if node.dtype else -1
        if node.at:
            if node.at not in strings:
                strings.append(node.at)
            columns["callsite"][i] = strings.index(node.at)
        if node.group:
            members = groups[node.group]
            columns["slot"][i] = mine.index(node.group)
            if node.peer >= 0:
                columns["peer"][i] = (members.index(node.peer) - members.index(rank)) % len(members)
            if node.root >= 0:
                columns["root"][i] = members.index(node.root)
        edges += [(named[name], i) for name in node.waits]
        if node.name:
            named[node.name] = i
        if not node.is_async:
            host = i
        elif host >= 0:
            edges.append((host, i))
    columns["segment"] = find_segments(columns)
    return Program(columns, np.array(edges, np.int32).reshape(-1, 2))


def _values(nodes: list[Node]) -> Values:
    given = {
        "bytes": [node.bytes for node in nodes],
        "count": [node.bytes // 4 for node in nodes],
        "tag": [node.tag for node in nodes],
    }
    columns = {name: np.array(column, np.int64) for name, column in given.items()}
    return Values(columns, Ragged.from_rows([list(node.splits) for node in nodes], np.int64))
