"""The coordinator: matches what ranks say; a rank gives up its turn where it blocks, and gets one when that is there."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prism_tools.capture import ranks, wire
from prism_tools.capture.kv import CHANGES
from prism_tools.capture.nodes import Nodes
from prism_tools.capture.server import Operation, Rank, Server, process_state, refusal_of
from prism_tools.graph.schema import P2P, Op, ReduceOrder
from prism_tools.graph.semantics import ignores_tags
from prism_tools.record.build import Shared
from prism_tools.record.history import History
from prism_tools.record.kept import is_essential, is_wanted
from prism_tools.record.polls import GAP, PATIENCE, is_question
from prism_tools.record.report import check_match, deadlock, notices, poll_notice
from prism_tools.record.stalls import LOOK, NOTICE, Stalls
from prism_tools.record.turns import State, Turn, Turns
from prism_tools.tensors.executor import Tensors, execute, unpack
from prism_tools.tensors.payload import PayloadWriter

STALL_POLL = 0.005  # seconds between two looks at a rank that may be blocked in C++


@dataclass
class Collective:
    """The n-th collective of a group, while members arrive."""

    first: Operation
    ins: list[Tensors | None]
    arrived: list[tuple[int, int] | None]  # (rank, opid) by group rank
    missing: int


class Coordinator(Server):
    """Runs the program's W ranks. ``slots``: ranks at a time on a machine. ``payloads``: where contributions are kept: the
    essential ones, and those that cross into the ranks ``cut`` (None: all). ``order``: of sums."""

    def __init__(
        self,
        slots: int,
        payloads: PayloadWriter,
        cut: frozenset[int] | None = None,
        order: ReduceOrder = ReduceOrder.RANK,
        nodes: Nodes | None = None,
    ) -> None:
        super().__init__(nodes)
        self.payloads = payloads
        self.cut = cut
        self.order = order
        self.turns = Turns(slots, self._is_missing)
        self.history = History()
        self.open: dict[tuple[int, int], Collective] = {}
        self.sends: dict[tuple, deque] = {}
        self.recvs: dict[tuple, deque] = {}
        self.hot: Collective | None = None
        self.shared = Shared()
        self.watching: set[int] = set()  # ranks with an operation that C++ may wait for
        self.stalls = Stalls()
        self.expired: list[
            tuple[int, list[str]]
        ] = []  # waits whose time limit was over since a store changed, or an operation
        self._alone = self._told = 0.0  # since when nobody but ranks that ask in vain could run (seconds)
        self.notices: list[str] = []  # what the user should hear while the recording goes on

    # --- turns

    def launch(self, spec: ranks.Spec) -> None:
        """Fork a rank; it runs when it gets a turn."""
        rank = self.spawn(spec)
        turn = self.turns[spec.rank] = Turn(rank, spec.eager_sends)
        self.turns.make_ready(turn, lambda: rank.main.send(("go",)))

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Run until every rank has left. PrismError: deadlock, mismatch, or a failed rank."""
        gc.disable()  # messages make no cycles, and a collection would hold up every rank
        while self.running():
            self.admit()
            self.turns.start()
            if not self.poll(STALL_POLL if self.watching else LOOK) and self.watching:
                self._look_for_stalls()
            if self.stalls.due():
                self._look_for_sleepers()
                self._look_for_polls()
            tick()
            if self.running() and not (self.turns.any_can_run() or self._anyone_leaving() or self._may_wake()):
                if not self._expire():
                    raise deadlock(self)

    def _anyone_leaving(self) -> bool:
        return any(not t.rank.gone for t in self.turns.values() if t.state is State.LEFT)

    def _may_wake(self) -> bool:
        """Whether a rank that is blocked elsewhere may go on: it only sleeps, or something moves in it."""
        stalled = [turn for turn in self.turns.values() if turn.is_stalled()]
        return any(not self.stalls.is_for_ever(turn.rank) for turn in stalled)

    def _expire(self, now: float = math.inf) -> bool:
        """Time passes only where no rank can run: the first time limit of a store wait is over, of those until ``now``
        (ns, monotonic). Not twice without news."""
        waiting = self.store.waiting.items()
        limits = {token: (w.deadline, w.rank, w.keys) for token, w in waiting if w.deadline and w.deadline <= now}
        for token, (_, number, keys) in sorted(limits.items(), key=lambda item: item[1][:2]):
            if (number, keys) not in self.expired:
                self.expired.append((number, keys))
                self.store.expire(token)
                self.on_store_ready(self.ranks[number], token[2], False)
                return True
        return False

    def _look_for_polls(self) -> None:
        """Where all that can run ask in vain, time passes as it does for them, and in the end nothing else will happen."""
        polls = [turn for turn in self.turns.values() if turn.polls.since and turn.state is not State.LEFT]
        others = [turn for turn in self.turns.values() if not turn.polls.since and self._can_run(turn)]
        if not polls or others:
            self._alone = 0.0
            return
        alone, self._alone = self._alone, max(self._alone, *(turn.polls.since for turn in polls))
        waited = time.monotonic() - self._alone
        if waited <= GAP or self._expire(time.monotonic_ns()):  # it may have asked twice, and compute now
            return
        if waited > PATIENCE:
            raise deadlock(self)
        if waited > NOTICE and self._told != alone:
            self._told = alone
            self.notices.append(poll_notice(self, polls))

    def _can_run(self, turn: Turn) -> bool:
        if turn.is_stalled():
            return not self.stalls.is_for_ever(turn.rank)
        return turn.state in (State.READY, State.ACTIVE) or (turn.state is State.LEFT and not turn.rank.gone)

    def _is_missing(self, number: int) -> bool:
        """Whether the latest waiters need this rank."""
        hot = self.hot
        if hot is None or not hot.missing:
            return False
        member = hot.first.group.index.get(number)
        return member is not None and hot.arrived[member] is None

    def handle(self, rank: Rank, peer: wire.Peer, message: tuple, payload: memoryview, fds: list[int]) -> None:
        turn = self.turns[rank.number]
        if peer is rank.main:
            self.stalls.forget(rank.number)
            if message[0] not in ("test", "store"):
                turn.polls.news()
            if turn.is_stalled():
                self.turns.wake(turn)
            elif turn.state is State.READY and turn.resume is not None:  # what it seemed to wait for has come meanwhile
                self.turns.wake(turn)
                turn.resume()
        super().handle(rank, peer, message, payload, fds)

    def _look_for_stalls(self) -> None:
        """An active rank that sleeps although a watched operation is open is blocked in C++: free its slot."""
        for turn in [self.turns[number] for number in self.watching]:
            if turn.state is State.ACTIVE:
                turn.sleeps = turn.sleeps + 1 if turn.rank.ask(process_state) == "S" else 0
                if turn.sleeps >= 2:
                    turn.sleeps = 0
                    self.turns.block(turn)

    def _look_for_sleepers(self) -> None:
        """A rank that sleeps outside communication frees its slot, wakes or not, and is named after a while."""
        idle = []
        for turn in self.turns.values():
            in_cpp = turn.rank.watched or turn.asked  # nobody needs to know while others run
            if turn.state is State.ACTIVE or (turn.is_stalled() and not (in_cpp and self.turns.any_can_run())):
                asleep = self.stalls.look(turn.rank)
                if asleep:
                    self.turns.block(turn)
                elif turn.is_stalled() and turn.rank.ask(process_state) == "R":
                    self.turns.wake(turn)
                if turn.is_stalled() and not in_cpp:
                    idle.append(turn.rank.number)
        self.notices += notices(self, self.stalls.to_name(idle))

    # --- what ranks say

    def admit(self) -> None:
        """Fork more ranks, where not all of them are there from the beginning."""

    def keep(self, rank: Rank, operation: Operation) -> None:
        """Note an operation, and keep what the rank contributes if that is wanted."""
        self.turns[rank.number].last = operation
        if operation.has_input:
            essential = is_essential(operation)
            if essential or is_wanted(rank.number, operation, self.cut):
                place = (rank.number, operation.node)
                self.payloads.add(place, operation.descs, operation.payload, essential)

    def on_op(self, rank: Rank, peer: wire.Peer, operation: Operation) -> None:
        turn = self.turns[rank.number]
        self.expired.clear()
        self.keep(rank, operation)
        if not (operation.op is Op.SEND and turn.eager_sends):
            turn.issued[operation.opid] = operation
        refused = refusal_of(operation)
        if refused:  # by every member alike, before any of them waits
            self._fail(turn, operation.opid, refused)
        elif operation.op in P2P:
            self._point_to_point(turn, operation)
        else:
            self._collective(turn, operation)
        if operation.sync:
            self.on_wait(rank, peer, operation.opid)

    def on_wait(self, rank: Rank, peer: wire.Peer, opid: int) -> None:
        turn = self.turns[rank.number]
        if opid in turn.done:
            peer.send(*turn.done.pop(opid))
        elif opid in turn.issued:
            if peer is not rank.main:
                turn.asked[opid] = peer
                self.watching.add(rank.number)  # the main thread may be waiting for this one
                return
            turn.waits, turn.wait_peer = opid, peer
            self.turns.block(turn)
            operation = turn.issued[opid]
            self.hot = self.open.get((operation.group.number, operation.sequence), self.hot)

    def on_test(self, rank: Rank, peer: wire.Peer, opid: int) -> None:
        turn = self.turns[rank.number]
        if opid in turn.done:
            turn.polls.news()
            peer.send(*turn.done.pop(opid))
        elif peer is rank.main:  # a spinning rank must let others run
            turn.polls.in_vain(("test", opid), None)
            self.turns.give_way(turn, lambda: peer.send(("pending",)))
        else:
            peer.send(("pending",))

    def on_watch(self, rank: Rank, opid: int) -> None:
        turn = self.turns[rank.number]
        if opid in turn.done and rank.push is not None:
            rank.watched.discard(opid)
            rank.push.send(*turn.done.pop(opid))
        else:
            self.watching.add(rank.number)

    def on_store_answer(self, rank: Rank, peer: wire.Peer, function: str, arguments: tuple, answer: Any) -> None:
        turn, vain = self.turns[rank.number], False
        if peer is rank.main:
            if is_question(function, arguments):
                vain = turn.polls.in_vain((function, ", ".join(map(repr, arguments))), answer)
            else:
                turn.polls.news()
        if function in CHANGES and not vain:
            self.expired.clear()
        if vain and turn.state is State.ACTIVE:  # it may be spinning: others get a turn before the answer
            self.turns.give_way(turn, lambda: peer.send(("ok", answer)))
        else:
            peer.send(("ok", answer))

    def on_store_wait(self, rank: Rank, peer: wire.Peer) -> None:
        turn = self.turns[rank.number]
        if peer is rank.main:
            turn.polls.news()
            turn.store_keys = True
            self.turns.block(turn)

    def on_store_ready(self, rank: Rank, peer: wire.Peer, answer: Any) -> None:
        turn = self.turns[rank.number]
        if peer is rank.main:
            self.turns.make_ready(turn, lambda: peer.send(("ok", answer)))
        else:
            peer.send(("ok", answer))

    def on_leave(self, rank: Rank, peer: wire.Peer) -> None:
        turn = self.turns[rank.number]
        if rank.trace is not None:
            rank.trace = self.shared.trace(rank.trace)
        self.turns.leave(turn)
        peer.send(("ok", None))

    def on_gone(self, rank: Rank, signal_number: int) -> None:
        turn = self.turns[rank.number]
        self.watching.discard(rank.number)
        self.turns.leave(turn)
        super().on_gone(rank, signal_number)

    # --- operations

    def _collective(self, turn: Turn, operation: Operation) -> None:
        group, number = operation.group, turn.rank.number
        operation.sequence = self.history.add(number, operation)
        key = (group.number, operation.sequence)
        found = self.open.get(key)
        size = len(group.members)
        if found is None:
            found = self.open[key] = Collective(operation, [None] * size, [None] * size, size)
        else:
            check_match(self, found, turn.rank.number, operation)
        member = group.index[number]
        found.ins[member] = unpack(operation.descs, operation.payload) if operation.has_input else []
        found.arrived[member] = (number, operation.opid)
        found.missing -= 1
        if not found.missing:
            del self.open[key]
            self._execute(found)
        elif operation.op is Op.BROADCAST and operation.root == member:
            self._complete(turn, operation.opid)  # the root has nothing to wait for
        elif operation.op in (Op.GATHER, Op.REDUCE) and operation.root != member:
            self._complete(turn, operation.opid)

    def _execute(self, found: Collective) -> None:
        first = found.first
        ins = [tensors or [] for tensors in found.ins]
        try:
            outs = execute(first.op, ins, first.reduce, first.root, first.factor, self.order, first.whole)
        except (RuntimeError, IndexError, ValueError) as error:
            where = f"{first.op.name.lower()} on group {first.group.label()} ({first.site})"
            for number, opid in filter(None, found.arrived):
                text = f"prism: {where}: the members' tensors do not fit together: {error}"
                self._fail(self.turns[number], opid, text)
            return
        packed: dict[int, tuple[list, wire.Parcel]] = {}
        for tensors, arrived in zip(outs, found.arrived, strict=True):
            assert arrived is not None
            number, opid = arrived
            if id(tensors) not in packed:
                packed[id(tensors)] = (wire.descs_of(tensors), wire.pack(tensors))
            descs, parcel = packed[id(tensors)]
            self._finish(self.turns[number], ("done", opid, descs, 0, -1), parcel)

    def _complete(self, turn: Turn, opid: int) -> None:
        """One member's operation is over, and it receives nothing."""
        self._finish(turn, ("done", opid, [], 0, -1))

    def _fail(self, turn: Turn, opid: int, text: str) -> None:
        """The member's wait raises a RuntimeError with this text."""
        self._finish(turn, ("failed", opid, text, 0, -1))

    def _finish(self, turn: Turn, message: tuple, parcel: wire.Parcel = wire.NOTHING) -> None:
        """The answer to one member's operation is there."""
        opid = message[1]
        if turn.issued.pop(opid, None) is None:
            return  # an early leaver: it has been answered already
        rank = turn.rank
        if opid in rank.watched and rank.push is not None:
            push = rank.push
            rank.watched.discard(opid)
            turn.asked.pop(opid, None)
            if not (rank.watched or turn.asked):
                self.watching.discard(rank.number)
            if turn.state is State.BLOCKED and (turn.waits == opid or not (turn.waits or turn.store_keys)):
                self.turns.make_ready(turn, lambda: push.send(message, parcel))
            else:
                push.send(message, parcel)
        elif turn.state is State.BLOCKED and turn.waits == opid:
            self.turns.make_ready(turn, lambda: rank.main.send(message, parcel))
        elif opid in turn.asked:
            turn.asked.pop(opid).send(message, parcel)
            if not (rank.watched or turn.asked):
                self.watching.discard(rank.number)
        else:
            turn.done[opid] = (message, parcel)

    def _point_to_point(self, turn: Turn, operation: Operation) -> None:
        """Match a send or receive by (group, sender, receiver, tag), in order; NCCL's have no tags."""
        group = operation.group
        tag = 0 if ignores_tags(group.backend) else operation.tag
        me = group.index[turn.rank.number]
        if operation.op is Op.SEND:
            for source in (me, -1):
                waiting = self.recvs.get((group.number, source, operation.peer, tag))
                if waiting:
                    receiver, opid = waiting.popleft()
                    self._deliver(receiver, opid, turn, operation)
                    return
            self.sends.setdefault((group.number, operation.peer, tag), deque()).append((me, turn, operation))
            return
        arrived = self.sends.get((group.number, me, tag), deque())
        for k, (source, sender, sent) in enumerate(arrived):
            if operation.peer in (-1, source):
                del arrived[k]
                self._deliver(turn, operation.opid, sender, sent)
                return
        key = (group.number, operation.peer, me, tag)
        self.recvs.setdefault(key, deque()).append((turn, operation.opid))

    def _deliver(self, receiver: Turn, opid: int, sender: Turn, sent: Operation) -> None:
        """Both sides have come: the receive has its results, and a send that waits has no more to wait for."""
        source = sent.group.index[sender.rank.number]
        self._finish(receiver, ("done", opid, sent.descs, 0, source), wire.Parcel([sent.payload]))
        self._complete(sender, sent.opid)
