"""The words and numbers of PrismTrace v1: facts only, no code that reads or writes."""

from enum import IntEnum, StrEnum

FORMAT = "prismtrace"
VERSION = 1
STAGES = ("bare", "sliced", "calibrated", "replayed")

HOST_LANE = 0  # lane index of the host queue; the graph's lane list always begins with "host"

PROLOGUE = -1  # segment of nodes before the first iteration; iterations are 0, 1, …
EPILOGUE = -2

UNKNOWN = -1  # a time, size or rank that nobody knows

PRETEND_CUDA = "pretend-cuda"  # the launch's device where programs for CUDA ran on CPUs (capture/pretend_cuda.py)


class Kind(IntEnum):
    """What a node is (P§5.1: compute spans and communication events; marks carry no time of their own)."""

    COMPUTE = 0
    COMM = 1
    WAIT = 2  # the host (or a stream) waits for earlier communication nodes, named by its incoming edges
    MARK = 3  # an optimizer step: where iterations end


class Op(IntEnum):
    """Operation of a node. COMM nodes carry one of the collectives or p2p ops."""

    NONE = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    OPTIMIZER_STEP = 12


P2P = (Op.SEND, Op.RECV)
ROOTED = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)


class Reduce(IntEnum):
    """Reduction of a COMM node (torch.distributed.ReduceOp); NONE where nothing is reduced."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9


class ReduceOrder(StrEnum):
    """In which order a recording added its members' contributions; its results depend on it in the last bits."""

    RANK = "rank"  # by group rank
    RING = "ring"  # as gloo's ring does


class Source(IntEnum):
    """Where a duration comes from (design §2)."""

    UNKNOWN = 0
    REAL = 1  # every member ran for real, with the real backend, in one slice or live capture
    PROBE = 2  # the same operation measured alone by communication-only processes
    FIT = 3  # a link model
    EMULATED = 4  # our own data plane
    PLANNED = 5  # changed on purpose: prism-calibrate --scale and the like


class Match(IntEnum):
    """How the members of one communication event hold each other up (design §2)."""

    COLLECTIVE = 0  # nobody ends before all have arrived
    ROOT_FIRST = 1  # NCCL's broadcast, scatter: the root leaves early, the others need only themselves and the root
    ROOT_LAST = 2  # NCCL's reduce, gather: the leaves leave early, the root needs everybody
    PAIR = 3  # send/recv, rendezvous: both end after both have arrived
    EAGER = 4  # send/recv, eager: the sender needs only itself
    ROOTED = 5  # gloo's scatter and gather: the root needs everybody, the others need only themselves and the root
    TREE = 6  # gloo's broadcast: a member needs its ancestors, itself and its children in a binomial tree


# Node columns of a program and their storage types; -1 where a column does not apply.
NODE_COLUMNS = {
    "kind": "u1",
    "op": "u1",
    "lane": "i2",  # index into the graph's lanes
    "slot": "i4",  # group slot: index into the rank's own list of groups
    "peer": "i4",  # p2p: (peer's group rank - own group rank) mod group size
    "root": "i4",  # rooted collectives: group rank of the root
    "dtype": "i2",  # index into DTYPES
    "reduce": "u1",
    "batch": "i4",  # nodes issued by one batch_isend_irecv or coalescing manager share a number >= 0
    "callsite": "i4",  # index into the graph's strings: "file.py:41 function" of the user's program
    "segment": "i4",
}

# Value columns, one row a node: what may differ between ranks of one program class.
VALUE_COLUMNS = {
    "bytes": "i8",  # this rank's contribution, or where it contributes nothing (recv, not the root) what it receives
    "count": "i8",  # elements of the same
    "tag": "i8",
}  # plus "splits", ragged: all_to_all's bytes to each member, then bytes from each member

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
)  # fmt: skip
