"""What a sandbox rank receives in an operation that crosses: live contributions combined with recorded ones (P§6.3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from prism_tools.capture.server import Operation
from prism_tools.emulate.contributions import Contribution
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import DTYPES, Op
from prism_tools.tensors.executor import Tensors, execute, unpack
from prism_tools.tensors.payload import PayloadReader

# Operations whose results come from the root alone.
FROM_ROOT = (Op.BROADCAST, Op.SCATTER)


class Values:
    """Results of crossing operations. ``unknown`` counts contributions that were not recorded: peers are then taken to hold
    what the receiver contributes itself (zeros where it contributes nothing), so shapes are right and values are not."""

    def __init__(self, graph: Graph, matches: Matches, payloads: PayloadReader | None) -> None:
        self._graph = graph
        self._matches = matches
        self.payloads = payloads
        self.unknown = 0

    def results(self, rank: int, operation: Operation, live: Mapping[int, Contribution]) -> Tensors:
        """Outputs of ``rank``; ``live``: the operations of the match's sandbox members that matter, by global rank."""
        if operation.op is Op.SEND:
            return []
        if operation.op is Op.RECV:
            return self._received(rank, operation, live)
        group = operation.group
        me = group.index[rank]
        if operation.op in (Op.REDUCE, Op.GATHER) and operation.root != me:
            return []
        if operation.op is Op.BROADCAST and operation.root == me:
            return []
        nodes = self._nodes(rank, operation)
        ins: list[Tensors] = []
        for member, number in enumerate(group.members):
            if operation.op in FROM_ROOT and member != operation.root:
                ins.append([])
            else:
                ins.append(self._contribution(number, nodes[number], operation, live))
        order = self._graph.launch.reduce_order
        outs = execute(operation.op, ins, operation.reduce, operation.root, operation.factor, order, operation.whole)
        return outs[me]

    def source(self, rank: int, operation: Operation) -> int:
        """Group rank of the sender of a receive."""
        if operation.op is not Op.RECV:
            return -1
        sender = next(number for number in self._nodes(rank, operation) if number != rank)
        return operation.group.index[sender]

    def _nodes(self, rank: int, operation: Operation) -> dict[int, int]:
        """Global rank → node of every member of the operation's match."""
        flat = int(self._matches.base[rank]) + operation.node
        members = self._matches.members[int(self._matches.of_node[flat])].tolist()
        return {self._matches.rank_of(member): self._matches.node_of(member) for member in members}

    def _received(self, rank: int, operation: Operation, live: Mapping[int, Contribution]) -> Tensors:
        sender, node = next((r, n) for r, n in self._nodes(rank, operation).items() if r != rank)
        if sender in live:
            return unpack(live[sender].descs, live[sender].payload)
        return self._recorded(sender, node, operation.descs, operation)

    def _contribution(self, number: int, node: int, operation: Operation, live: Mapping[int, Contribution]) -> Tensors:
        if number in live:
            mine = live[number]
            return unpack(mine.descs, mine.payload) if mine.has_input else []
        if operation.op is Op.BARRIER:
            return []
        return self._recorded(number, node, self._descs(number, node, operation), operation)

    def _recorded(self, number: int, node: int, descs: list[tuple[str, int]], operation: Operation) -> Tensors:
        data = self.payloads.get(number, node) if self.payloads is not None else None
        size = sum(count * getattr(torch, name).itemsize for name, count in descs)
        if data is None or len(data) != size:
            self.unknown += 1
            mine = operation.payload if operation.has_input and len(operation.payload) == size else bytearray(size)
            return unpack(descs, memoryview(mine))
        return unpack(descs, data)

    def _descs(self, number: int, node: int, operation: Operation) -> list[tuple[str, int]]:
        """How a virtual member's contribution is laid out: as the sandbox member's own, but for sizes that may differ."""
        values = self._graph.values_of(number)
        program = self._graph.program_of(number)
        dtype = DTYPES[int(program.dtype[node])]
        itemsize = getattr(torch, dtype).itemsize
        size = int(values.bytes[node])
        if operation.op is Op.ALL_TO_ALL:
            sent = values.splits[node][: len(operation.group.members)]
            return [(dtype, int(length) // itemsize) for length in sent]
        if operation.op in FROM_ROOT and operation.op is Op.SCATTER:
            members = len(operation.group.members)
            return [(dtype, size // itemsize // members)] * members
        if sum(count * getattr(torch, name).itemsize for name, count in operation.descs) == size:
            return operation.descs
        return [(dtype, size // itemsize)]
