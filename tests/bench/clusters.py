"""Graphs of training jobs as they run on clusters: tensor, pipeline, data and expert parallel, with known durations."""

from dataclasses import dataclass

import numpy as np

from prism_tools.graph.model import (
    Durations,
    Graph,
    Groups,
    Launch,
    Payload,
    Probes,
    Program,
    Ragged,
    Ranks,
    StoreLog,
    Timing,
    Values,
)  # fmt: skip
from prism_tools.graph.schema import NODE_COLUMNS, Kind, Op, Source

TP, PP, DP, EP = range(4)  # group slots
HOST, STREAM, DATA, PIPE = range(4)  # lanes
LANES = ["host", "stream 7", "nccl 1", "nccl 2"]
TOOK = {Op.ALL_REDUCE: 30_000, Op.ALL_TO_ALL: 45_000, Op.SEND: 20_000, Op.RECV: 20_000, Op.REDUCE_SCATTER: 400_000}
MIB = 2**20
PROBING = 8  # processes


@dataclass
class Cluster:
    """``chunks`` > 1: the interleaved schedule (needs pp > 2 and microbatches in multiples of pp). ``overlap``: hosts,
    streams and the backend's streams run beside each other, else every rank does one thing after the other."""

    tp: int = 2
    pp: int = 2
    dp: int = 2
    ep: int = 1
    layers: int = 2
    microbatches: int = 4
    chunks: int = 1
    buckets: int = 2
    iterations: int = 2
    overlap: bool = False
    message: int = 8 * MIB

    @property
    def world_size(self):
        return self.tp * self.pp * self.dp


class _Stage:
    """The nodes of a rank of one pipeline stage."""

    def __init__(self, cluster, stage):
        self.cluster, self.stage = cluster, stage
        self.nodes, self.edges, self.last = [], [], {}
        self.batch = 0

    def node(self, kind, lane, op=Op.NONE, slot=-1, peer=-1, nbytes=0, after=(), batch=-1):
        number = len(self.nodes)
        lane = lane if self.cluster.overlap else HOST
        self.nodes.append((kind, op, lane, slot, peer, batch, self.segment, nbytes))
        if self.cluster.overlap:
            self.edges += [(source, number) for source in after if source >= 0]
        self.last[lane] = number
        return number

    def compute(self):
        if self.cluster.overlap:
            self.node(Kind.COMPUTE, STREAM, after=[self.node(Kind.COMPUTE, HOST)])
        else:
            self.node(Kind.COMPUTE, HOST)

    def collective(self, op, slot, nbytes, lane=STREAM):
        self.compute()
        return self.node(Kind.COMM, lane, op, slot, nbytes=nbytes, after=[self.last.get(STREAM, -1)] * (lane != STREAM))

    def passed_on(self, op, step):
        """A send to, or a receive from, the stage ``step`` further on; who receives waits."""
        self.compute()
        issued, peer = self.last.get(STREAM, -1), step % self.cluster.pp
        number = self.node(Kind.COMM, PIPE, op, PP, peer, self.cluster.message * (op == Op.SEND), [issued], self.batch)
        self.batch += 1
        if op == Op.RECV and self.cluster.overlap:
            self.node(Kind.WAIT, STREAM, after=[number])

    def layer(self):
        for _ in range(2):
            self.collective(Op.ALL_REDUCE, TP, 4 * MIB)
        if self.cluster.ep > 1:
            for _ in range(2):
                self.collective(Op.ALL_TO_ALL, EP, MIB)

    def pass_through(self, chunk, forward):
        """One microbatch through the layers of one chunk."""
        step = 1 if forward else -1
        place = chunk * self.cluster.pp + self.stage
        final = self.cluster.chunks * self.cluster.pp - 1
        first, last = (0, final) if forward else (final, 0)
        if place != first:
            self.passed_on(Op.RECV, -step)
        for _ in range(self.cluster.layers):
            self.layer()
        if place != last:
            self.passed_on(Op.SEND, step)

    def iteration(self, segment):
        cluster, self.segment = self.cluster, segment
        total, ahead = cluster.microbatches * cluster.chunks, cluster.pp - self.stage - 1
        warmup = min(ahead if cluster.chunks == 1 else 2 * ahead + (cluster.chunks - 1) * cluster.pp, total)

        def chunk(k):
            return k // cluster.pp % cluster.chunks

        for k in range(total + warmup):
            if k < total:
                self.pass_through(chunk(k), True)
            if k >= warmup:
                self.pass_through(cluster.chunks - 1 - chunk(k - warmup), False)
        reduced = [
            self.collective(Op.REDUCE_SCATTER, DP, 64 * MIB, DATA) for _ in range(cluster.buckets * (cluster.dp > 1))
        ]
        if cluster.overlap:
            self.node(Kind.WAIT, STREAM, after=reduced)
            self.node(Kind.WAIT, HOST, after=[self.last[STREAM]])
        self.compute()
        self.node(Kind.MARK, HOST, Op.OPTIMIZER_STEP)

    def program(self):
        for k in range(self.cluster.iterations):
            self.iteration(k)
        rows = np.array(self.nodes, np.int64)
        columns = {
            name: np.full(len(rows), -1 if dtype[0] == "i" else 0, dtype) for name, dtype in NODE_COLUMNS.items()
        }
        for k, name in enumerate(("kind", "op", "lane", "slot", "peer", "batch", "segment")):
            columns[name] = rows[:, k].astype(NODE_COLUMNS[name])
        columns["callsite"] = np.where(columns["kind"] == Kind.COMM, 0, -1).astype("i4")
        columns["dtype"] = np.where(columns["kind"] == Kind.COMM, 0, -1).astype("i2")
        nbytes = rows[:, 7]
        values = {"bytes": nbytes, "count": nbytes // 4, "tag": nbytes * 0}
        splits = Ragged(np.zeros(len(rows) + 1, np.int64), np.empty(0, np.int64))
        return Program(columns, np.array(self.edges, np.int32).reshape(-1, 2)), Values(values, splits)


def build(cluster):
    """The bare graph. Rank (stage * dp + replica) * tp + shard: the ranks of a stage share a program."""
    tp, pp, dp, ep = cluster.tp, cluster.pp, cluster.dp, cluster.ep
    size = cluster.world_size
    grid = np.arange(size, dtype=np.int32).reshape(pp, dp, tp)
    axes = {
        TP: grid.reshape(-1, tp),
        PP: grid.transpose(1, 2, 0).reshape(-1, pp),
        DP: grid.transpose(0, 2, 1).reshape(-1, dp),
        EP: grid.reshape(pp, dp // ep, ep, tp).transpose(0, 1, 3, 2).reshape(-1, ep),
    }
    slots = np.empty((size, 4), np.int32)
    members, names = [], []
    for slot, rows in axes.items():
        slots[rows, slot] = len(members) + np.arange(len(rows))[:, None]
        names += [f"{('tp', 'pp', 'dp', 'ep')[slot]}{k}" for k in range(len(rows))]
        members += list(rows)
    both = [_Stage(cluster, stage).program() for stage in range(pp)]
    stage = np.repeat(np.arange(pp, dtype=np.int32), dp * tp)
    ranks = np.arange(size, dtype=np.int32)
    return Graph(
        stage="bare",
        world_size=size,
        launch=Launch(["train.py"], "/", {}, "python3", 8, "cuda", "nccl", 0, np.zeros(size, np.uint64), 1, -1),
        groups=Groups(names, names, ["nccl"] * len(names), Ragged.from_rows(members, np.int32)),
        programs=[program for program, _ in both],
        values=[values for _, values in both],
        ranks=Ranks(stage, stage, ranks % 8, ranks // 8, Ragged.from_rows(list(slots), np.int32)),
        lanes=LANES if cluster.overlap else LANES[:1],
        strings=["train.py:1 train"],
        store=StoreLog(np.empty(0, np.int32), [], [], []),
        payload=Payload(),
    )


def durations(graph, row, seed=0, slow=()):
    """Random spans, one row for each number in ``row`` (int[W]; ranks of one row have one program); ``slow`` ranks have
    rows of their own in which computing takes a tenth longer."""
    rng = np.random.default_rng(seed)
    row = np.unique(np.asarray(row), return_inverse=True)[1].astype(np.int32)
    _, first = np.unique(row, return_index=True)
    own = [_own(graph.program_of(rank), rng) for rank in first.tolist()]
    for rank in slow:
        program = graph.program_of(rank)
        own.append(own[row[rank]] * np.where(program.kind == Kind.COMPUTE, 11, 10) // 10)
        row[rank] = len(own) - 1
    zero = {len(o): np.zeros(len(o), np.int64) for o in own}
    real = {len(o): np.full(len(o), Source.REAL, np.uint8) for o in own}
    return Durations(row, own, *([zero[len(o)] for o in own] for _ in range(3)), [real[len(o)] for o in own])


def sliced(cluster, seed=0):
    """The graph as prism-slice leaves it: one replica, measured in one slice, and probes of the rest. Without
    overlap: one lane, whose nodes follow each other."""
    graph, rng = build(cluster), np.random.default_rng(seed)
    grid = np.arange(graph.world_size, dtype=np.int32).reshape(cluster.pp, cluster.dp, cluster.tp)
    rank = grid[:, 0].reshape(-1)
    end = [np.cumsum(_own(graph.program_of(r), rng)) for r in rank.tolist()]
    start = [np.append(0, row[:-1]) for row in end]
    zero = np.zeros(len(rank), np.int64)
    which = zero.astype(np.int32)
    graph.timing = Timing(rank, which, which, zero, zero, zero, start, start, start, end)
    op, size = np.array([Op.REDUCE_SCATTER, Op.ALL_TO_ALL], np.uint8), np.array([cluster.dp, cluster.ep], np.int32)
    took, nbytes = np.array([TOOK[k] for k in op.tolist()], np.int64), np.array([64 * MIB, MIB], np.int64)
    tails = [np.resize(rng.integers(0, 9_000, min(many, PROBING)), many) for many in size.tolist()]
    two = which[:2]
    graph.probes = Probes(op, two.astype(np.int16), two.astype(np.uint8), size, nbytes, took, took // 20, two + 5,
                          tails, tails, np.minimum(size, PROBING))  # fmt: skip
    graph.stage = "sliced"
    return graph


def _own(program, rng):
    computing = program.kind == Kind.COMPUTE
    span = rng.integers(20_000, 200_000, len(program))
    span = np.where(program.lane == HOST, span // (10 if program.lane.any() else 1), span)
    took = np.zeros(max(Op) + 1, np.int64)
    took[list(TOOK)] = list(TOOK.values())
    return np.where(computing, span, np.where(program.kind == Kind.COMM, took[program.op], 0)).astype(np.int64)
