"""What the graph means on each backend: which lanes are queues, and who holds up whom in a match."""

from __future__ import annotations

import numpy as np

from prism_tools.graph.schema import HOST_LANE, P2P, Match, Op

# Who leaves early. Gloo: measured with one late member at a time; its sends are rendezvous, so a root waits for
# whom it sends to. Its reduce is a chain that holds up nearly everybody: taken as a collective.
_GLOO = {
    Op.BROADCAST: Match.TREE,
    Op.SCATTER: Match.ROOTED,
    Op.GATHER: Match.ROOTED,
}
_NCCL = {
    Op.BROADCAST: Match.ROOT_FIRST,
    Op.SCATTER: Match.ROOT_FIRST,
    Op.REDUCE: Match.ROOT_LAST,
    Op.GATHER: Match.ROOT_LAST,
}


# NCCL copies a message into the receiver's buffers (4 MiB, NCCL_BUFFSIZE, for each channel of the pair) without waiting for
# the receiver. Measured on two H200s (NVLink, NCCL 2.28.9): 16 MiB sends end 80 µs after their start, whoever is late.
EAGER_BYTES = {"nccl": 16 << 20}


def match_kind(backend: str, op: Op) -> Match:
    """How the members of one ``op`` on ``backend`` ("gloo", else as NCCL) hold each other up, however large they are."""
    if op in P2P:
        return Match.PAIR
    return (_GLOO if backend == "gloo" else _NCCL).get(op, Match.COLLECTIVE)


def is_queue(lane_name: str) -> bool:
    """Whether the nodes of this lane run one after the other. Gloo's lane is a thread pool, all others are queues."""
    return lane_name != "gloo"


def computing_lanes(names: list[str], used: np.ndarray) -> list[int]:
    """The lanes on which a rank computes, of those ``used`` by its nodes: its own streams where it has a device ("nccl n"
    are the backend's), else the host's."""
    return [k for k, name in enumerate(names) if name.startswith("stream") and (used == k).any()] or [HOST_LANE]


def ignores_tags(backend: str) -> bool:
    """Whether sends and receives match by order alone, whatever their tags."""
    return backend == "nccl"
