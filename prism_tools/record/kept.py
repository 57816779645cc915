"""Which contributions a recording keeps the payload of."""

from __future__ import annotations

from prism_tools.capture.server import Operation
from prism_tools.graph.schema import ROOTED, Op
from prism_tools.tensors.cut import crosses

SMALL = 64 << 10  # bytes (design §5)


def is_essential(operation: Operation) -> bool:
    """Contributions that steer a program (sizes, splits, indices, pickled objects) are always kept: small or integer ones."""
    return len(operation.payload) <= SMALL or "float" not in operation.descs[0][0]


def is_wanted(rank: int, operation: Operation, cut: frozenset[int] | None) -> bool:
    """Whether the contribution crosses into the ranks ``cut``; None: everything is wanted."""
    if cut is None:
        return True
    members = operation.group.members
    receivers = (members[operation.peer],) if operation.op is Op.SEND else members
    root = members[operation.root] if operation.op in ROOTED else -1
    return crosses(operation.op, rank, root, receivers, cut)
