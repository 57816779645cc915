"""What the graph means on each backend: which lanes are queues, and who holds up whom in a match."""

from __future__ import annotations

from prism_tools.graph.schema import P2P, Match, Op

# Who leaves early (design §2). The barrier's op never has a root; all-to-all and gathers to all need everybody.
_BY_OP = {
    Op.BROADCAST: Match.ROOT_FIRST,
    Op.SCATTER: Match.ROOT_FIRST,
    Op.REDUCE: Match.ROOT_LAST,
    Op.GATHER: Match.ROOT_LAST,
    Op.SEND: Match.PAIR,
    Op.RECV: Match.PAIR,
}


def match_kind(backend: str, op: Op) -> Match:
    """How the members of one ``op`` on ``backend`` ("gloo", "nccl") hold each other up.

    Both backends agree: gloo's sends are rendezvous at every size, and NCCL's are treated so. No backend makes EAGER
    matches yet; the kind exists for graphs that are edited by hand.
    """
    return _BY_OP.get(op, Match.COLLECTIVE)


def is_queue(lane_name: str) -> bool:
    """Whether the nodes of this lane run one after the other. Gloo's lane is a thread pool, all others are queues."""
    return lane_name != "gloo"


def ignores_tags(backend: str) -> bool:
    """Whether sends and receives match by order alone, whatever their tags."""
    return backend == "nccl"


def is_p2p(op: int) -> bool:
    """Whether ``op`` is a send or a receive."""
    return op in P2P
