"""The graph in memory: flat numpy arrays, one copy of the structure per program class. Knows nothing of HDF5 or torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.schema import NODE_COLUMNS, VALUE_COLUMNS, ReduceOrder


@dataclass
class Ragged:
    """Rows of different lengths: row k is ``data[offset[k]:offset[k + 1]]``. ``offset`` is int64[n + 1]."""

    offset: np.ndarray
    data: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence | Ragged, dtype: Any) -> Ragged:
        """Pack ``rows`` (1-D sequences)."""
        if isinstance(rows, Ragged):
            return cls(rows.offset, rows.data.astype(dtype, copy=False))
        lengths = [len(row) for row in rows]
        offset = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        data = np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.empty(0, dtype)
        return cls(offset, data.astype(dtype))

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, k: int) -> np.ndarray:
        return self.data[self.offset[k] : self.offset[k + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        offset = self.offset.tolist()
        return (self.data[a:b] for a, b in zip(offset[:-1], offset[1:], strict=True))


@dataclass
class Groups:
    """Process groups. ``members[g]`` are global ranks (int32) in group-rank order."""

    name: list[str] = field(default_factory=list)
    desc: list[str] = field(default_factory=list)
    backend: list[str] = field(default_factory=list)
    members: Ragged = field(default_factory=lambda: Ragged.from_rows([], np.int32))

    def __len__(self) -> int:
        return len(self.name)


@dataclass
class Program:
    """One program class: node columns of equal length (schema.NODE_COLUMNS) and edges int32[E, 2] (src, dst), src < dst.

    The order of a lane's own nodes is implied for queue lanes; edges are issue, wait and event edges (design §2).
    """

    columns: dict[str, np.ndarray]
    edges: np.ndarray

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def __getattr__(self, name: str) -> np.ndarray:
        if name in NODE_COLUMNS:
            return self.columns[name]
        raise AttributeError(name)


@dataclass
class Values:
    """Per-node values of one value class: schema.VALUE_COLUMNS (int64[n]) and ``splits`` (Ragged int64, n rows)."""

    columns: dict[str, np.ndarray]
    splits: Ragged

    def __getattr__(self, name: str) -> np.ndarray:
        if name in VALUE_COLUMNS:
            return self.columns[name]
        raise AttributeError(name)


@dataclass
class Ranks:
    """Per rank: program and value class (int32[W]), place (local_rank, node: int32[W]), slots[r][s] = group id.

    ``ran``: int32[W], the rank that really ran, whose payloads are this one's too; None: every rank ran itself."""

    program: np.ndarray
    values: np.ndarray
    local_rank: np.ndarray
    node: np.ndarray
    slots: Ragged
    ran: np.ndarray | None = None


@dataclass
class Timing:
    """Measured times, one row per (rank, slice, repeat); each row's arrays have one int64 ns per node of that rank.

    ``host_issue``: the host reached the call; ``ready``: the node could start (its lane was free and its inputs there);
    ``start``, ``end``: it ran. Times of one row share one clock: clock_offset (ns to add to reach the leader's clock,
    that of the machine where the run's first rank ran), clock_drift (parts per 1e9), clock_error (ns, bound).
    """

    rank: np.ndarray
    slice: np.ndarray
    repeat: np.ndarray
    clock_offset: np.ndarray
    clock_drift: np.ndarray
    clock_error: np.ndarray
    host_issue: list[np.ndarray]
    ready: list[np.ndarray]
    start: list[np.ndarray]
    end: list[np.ndarray]
    iteration_ns: list[np.ndarray] = field(default_factory=list)  # per row: measured time of each iteration


@dataclass
class Probes:
    """Durations of operations measured alone: one row per distinct (op, dtype, reduce, K, bytes); ns.

    ``duration``: first end after the last arrival; ``spread``: half the interquartile range;
    ``tails[k]``: int64[K], (member's end - first end) by group rank; ``issue[k]``: int64[K], what the host takes to issue
    it asynchronously. Means, but for the spread: latencies are skewed, and waits add them up. ``processes``: how many ran it;
    fewer than ``size`` show what a larger group takes only by analogy (by default all ran it).
    """

    op: np.ndarray
    dtype: np.ndarray
    reduce: np.ndarray
    size: np.ndarray
    bytes: np.ndarray
    duration: np.ndarray
    spread: np.ndarray
    repeats: np.ndarray
    tails: list[np.ndarray]
    issue: list[np.ndarray]
    processes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        if len(self.processes) != len(self.size):
            self.processes = self.size.astype(np.int32)


@dataclass
class Durations:
    """What each node takes, per timing class: ``row[r]`` (int32[W]) names the rank's row; row arrays have one int64 ns per node.

    ``own``: COMPUTE, WAIT, MARK: own time after everything it waits for; COMM: the match's d (the same for all members).
    ``tail``: COMM: this member's end after the match's first end. ``source``: schema.Source.
    Half-widths, ns: ``spread`` of what differs each time by chance, ``bias`` of what is wrong by the same each time.
    """

    row: np.ndarray
    own: list[np.ndarray]
    tail: list[np.ndarray]
    spread: list[np.ndarray]
    bias: list[np.ndarray]
    source: list[np.ndarray]


@dataclass
class Timeline:
    """The solved schedule: ``row[r]`` names rank r's row in ``start``/``end`` (int64 ns per node, one global clock).

    ``iteration_ns``: solved time of each iteration after warm-up; ``iteration_time_ns``, ``interval_ns``: their mean and
    half-width. ``critical``: int64[n, 2] (rank, node) of the critical path of the iterations, first to last.
    """

    row: np.ndarray
    start: list[np.ndarray]
    end: list[np.ndarray]
    iteration_ns: np.ndarray
    iteration_time_ns: int
    interval_ns: int
    critical: np.ndarray


@dataclass
class Steady:
    """An iteration repeated for ever: ``total_ns`` / ``iterations`` each in the long run, exactly (the largest mean of a
    cycle through iterations; ``critical``: int64[n, 2] (rank, node) along that cycle, named by one iteration's nodes).

    ``since``, ``period``: the least k0 and p from which on every p iterations take exactly p times that, at every node, if
    all ranks begin iteration 0 together; UNKNOWN if not so within ``horizon`` iterations. ``problem``: why there is none.
    """

    problem: str
    total_ns: int
    iterations: int
    since: int
    period: int
    horizon: int
    critical: np.ndarray


@dataclass
class Replay:
    """Measurements of one replay: rows of the sandbox ranks, late deliveries and validity per iteration."""

    timing: Timing
    late: np.ndarray  # int64[iterations]: deliveries later than planned
    late_ns: np.ndarray  # int64[iterations]: their sum
    valid: np.ndarray  # bool[iterations]
    groups_created: int
    virtual_ranks_touched: int


@dataclass
class Memory:
    """Peak memory per measured rank, bytes: ``rss`` peak resident set of the process; ``allocated``, ``reserved``: of
    torch's allocator on the device, -1 where there is none."""

    rank: np.ndarray
    rss: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray
    stage: list[str]


@dataclass
class Payload:
    """Where the recorded tensors are: a store file named by UUID, last known path, and how much was kept."""

    uuid: str = ""
    path: str = ""
    mode: str = "none"
    bytes: int = 0


@dataclass
class StoreLog:
    """Operations of the rendezvous store that change it, in order: rank, op ("set", "add", …), key, value."""

    rank: np.ndarray
    op: list[str]
    key: list[str]
    value: list[bytes]


@dataclass
class Launch:
    """How to run the program again. ``entropy``: uint64[W], the seed of each rank's Python and NumPy generators."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    python: str
    nproc_per_node: int
    device: str
    backend: str
    hash_seed: int
    entropy: np.ndarray
    warmup: int
    stop_after: int  # iterations after which the recording stopped, or -1: the program ran to its end
    reduce_order: ReduceOrder = ReduceOrder.RANK
    foreign_owner: int = -1  # uid of an owner other than the caller that a tool met and was not told to trust


@dataclass
class Graph:
    """A PrismTrace graph. Stages only add: None where a later tool has not run yet. ``unknown`` is carried through."""

    stage: str
    world_size: int
    launch: Launch
    groups: Groups
    programs: list[Program]
    values: list[Values]
    ranks: Ranks
    lanes: list[str]
    strings: list[str]
    store: StoreLog
    payload: Payload
    provenance: list[dict[str, str]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    timing: Timing | None = None
    probes: Probes | None = None
    memory: Memory | None = None
    durations: Durations | None = None
    timeline: Timeline | None = None
    steady: Steady | None = None
    replay: Replay | None = None
    complete: bool = True
    unknown: dict[str, Any] = field(default_factory=dict)

    def program_of(self, rank: int) -> Program:
        """The nodes of ``rank``; PrismError if there is no such rank."""
        self.check_rank(rank)
        return self.programs[self.ranks.program[rank]]

    def values_of(self, rank: int) -> Values:
        """The values of ``rank``'s nodes."""
        self.check_rank(rank)
        return self.values[self.ranks.values[rank]]

    def check_rank(self, rank: int) -> None:
        """PrismError unless 0 <= rank < world_size."""
        if not 0 <= rank < self.world_size:
            raise PrismError(f"no rank {rank} (file has 0-{self.world_size - 1})")

    def group_rank(self, group: int, rank: int) -> int:
        """Position of global ``rank`` in ``group``; -1 if it is not a member."""
        found = np.flatnonzero(self.groups.members[group] == rank)
        return int(found[0]) if len(found) else -1

    def iterations(self) -> int:
        """Number of whole iterations that every rank ran."""
        return min((int(program.segment.max(initial=-1)) + 1 for program in self.programs), default=0)
