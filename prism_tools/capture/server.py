"""The server side shared by the coordinator and the assistant: rank processes, their sockets, the store, and clean endings."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from prism_tools.capture import clock, ranks, wire
from prism_tools.capture.kv import KeyValue
from prism_tools.errors import PrismError
from prism_tools.graph.schema import Op, Reduce
from prism_tools.tensors.refusals import refusal

if TYPE_CHECKING:
    from prism_tools.capture.nodes import Nodes

FULL_POLL = 0.001  # seconds between attempts to send what a full socket did not take
LAST_WORDS = ("group", "trace", "leave", "channel", "push")  # what is heard once a run is given up
GRACE = 10.0  # seconds that ranks get to send their traces and leave when a run is given up


@dataclass
class Group:
    """A process group that some rank has announced. ``index``: global rank → group rank."""

    number: int
    name: str
    desc: str
    backend: str
    members: tuple[int, ...]
    index: dict[int, int]

    def label(self) -> str:
        """As reports name it: description (or name) and members."""
        shown = ",".join(map(str, self.members[:8])) + (",…" if len(self.members) > 8 else "")
        title = self.desc if self.desc not in ("", "undefined") else self.name
        return f"{'world' if self.desc == 'default_pg' else title} [{shown}]"


@dataclass
class Operation:
    """One member's call as it arrived. ``reply``: the socket that waits for it, once one does."""

    opid: int
    node: int
    group: Group
    op: Op
    reduce: Reduce
    root: int
    peer: int
    tag: int
    descs: list[tuple[str, int]]
    has_input: bool
    site: str
    issued: int
    sync: bool
    factor: float
    whole: bool
    payload: memoryview
    sequence: int = -1  # its place among the rank's collectives on the group (record only)

    def text(self) -> str:
        """As messages show it: operation, size, type and place."""
        size = sum(count * wire.itemsize(name) for name, count in self.descs)
        dtype = f" {self.descs[0][0]}" if self.descs else ""
        return f"{self.op.name.lower()} {size:,} B{dtype} ({self.site})"


def refusal_of(operation: Operation) -> str:
    """Why the group's real backend would refuse this operation; "" if it would not."""
    dtype = operation.descs[0][0] if operation.descs else ""
    return refusal(operation.group.backend, operation.op, operation.reduce, dtype)


class Here:
    """Where ranks are that the server forks itself: on its own machine. ``clock``: that machine's. ``beside``: the node of the
    assistant that has their values; "": the server itself."""

    name = ""
    beside = ""
    clock = clock.Clock()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` says on the machine where the ranks are."""
        return function(*arguments)


HERE = Here()


@dataclass
class Rank:
    """A rank process as its server sees it. ``place``: the machine that ``pid`` belongs to."""

    number: int
    pid: int
    main: wire.Peer
    place: Here = HERE
    push: wire.Peer | None = None
    others: list[wire.Peer] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    slots: list[Group] = field(default_factory=list)
    watched: set[int] = field(default_factory=set)
    trace: dict[str, Any] | None = None
    left: bool = False  # asked to leave; its program is over
    iterations: int = 0  # that it has ended (record only)
    gone: bool = False  # the process has been reaped
    status: int = 0

    def peers(self) -> list[wire.Peer]:
        return [self.main, *([self.push] if self.push else []), *self.others]

    def adopt(self, kind: str, peer: wire.Peer) -> None:
        """One more socket: "push", or a thread's "channel"."""
        if kind == "push":
            self.push = peer
        else:
            self.others.append(peer)

    def ask(self, function: Callable[[int], Any]) -> Any:
        """What ``function`` says of the rank's process, where that is."""
        return self.place.ask(function, self.pid)

    def text(self) -> str:
        """As messages name it."""
        return f"rank {self.number}" + (f" on node {self.place.name}" if self.place.name else "")


class Failure(PrismError):
    """A rank ended badly: ``status`` is what its process returned, 128 + N for signal N."""


class Server:
    """Owns the ranks that it forks, here or on ``nodes``. Subclasses play the operations: ``on_op``, ``on_wait``, ``on_test``,
    ``on_watch``. All times are on the clock of this process."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        self.ranks: dict[int, Rank] = {}
        self.groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self.store = KeyValue()
        self.full: set[wire.Peer] = set()
        self.given_up = False
        self.alive = 0  # rank processes that have not been reaped
        self.own: list[socket.socket] = []  # what ranks must not hold, beside the sockets of others
        self.nodes = nodes
        if nodes is not None:
            nodes.serve(self)

    # --- what subclasses provide

    def on_op(self, rank: Rank, peer: wire.Peer, operation: Operation) -> None:
        """An operation has been issued."""
        raise NotImplementedError

    def on_wait(self, rank: Rank, peer: wire.Peer, opid: int) -> None:
        """The rank blocks until ``opid`` completes (record only)."""
        raise NotImplementedError

    def on_test(self, rank: Rank, peer: wire.Peer, opid: int) -> None:
        """The rank polls (record only)."""
        raise NotImplementedError

    def on_watch(self, rank: Rank, opid: int) -> None:
        """Complete ``opid`` through the push socket."""
        raise NotImplementedError

    def on_store_wait(self, rank: Rank, peer: wire.Peer) -> None:
        """The rank waits for store keys."""

    def on_store_answer(self, rank: Rank, peer: wire.Peer, function: str, arguments: tuple, answer: Any) -> None:
        """The store's answer is there at once."""
        peer.send(("ok", answer))

    def on_store_ready(self, rank: Rank, peer: wire.Peer, answer: Any) -> None:
        """The keys exist now."""
        peer.send(("ok", answer))

    def on_leave(self, rank: Rank, peer: wire.Peer) -> None:
        """The rank's trace is here and its program is over."""
        peer.send(("ok", None))

    # --- processes

    def spawn(self, spec: ranks.Spec) -> Rank:
        """Fork one rank; it waits for "go"."""
        rank = self.ranks[spec.rank] = self._fork(spec) if self.nodes is None else self.nodes.spawn(spec)
        self.alive += 1
        return rank

    def _fork(self, spec: ranks.Spec) -> Rank:
        close = self.own + [peer.sock for rank in self.ranks.values() for peer in rank.peers()]
        pid, sock = ranks.fork(spec, close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        rank = Rank(spec.rank, pid, wire.Peer(sock, self.full))
        self._listen(rank, rank.main)
        return rank

    def running(self) -> bool:
        return self.alive > 0

    def poll(self, timeout: float | None) -> bool:
        """Handle what has arrived; False if nothing came in time."""
        caught_up = self.nodes is not None and self.nodes.catch_up()
        if caught_up:
            timeout = 0
        events = self.selector.select(min(timeout or FULL_POLL, FULL_POLL) if self.full else timeout)
        for key, _ in events:
            key.data()
        for peer in list(self.full):
            peer.flush()
        return caught_up or bool(events)

    def _listen(self, rank: Rank, peer: wire.Peer) -> None:
        self.selector.register(peer.sock, selectors.EVENT_READ, partial(self._read, rank, peer))

    def _read(self, rank: Rank, peer: wire.Peer) -> None:
        try:
            blob, payload, fds = wire.receive_pickled(peer.sock)
        except (EOFError, ConnectionError):
            self._closed(rank, peer)
            return
        except OSError as error:
            raise PrismError(f"rank {rank.number}: {error.strerror}; raise ulimit -n") from error
        self.arrived(rank, peer, blob, payload, fds)

    def arrived(self, rank: Rank, peer: wire.Peer, blob: memoryview, payload: memoryview, fds: list[int]) -> None:
        """A rank's message, pickled, is here."""
        message = pickle.loads(blob)
        if not self.given_up:
            self.handle(rank, peer, message, payload, fds)
        elif message[0] in LAST_WORDS:  # and nothing else is answered: the rank would take it for the answer to these
            Server.handle(self, rank, peer, message, payload, fds)

    def _closed(self, rank: Rank, peer: wire.Peer) -> None:
        self.selector.unregister(peer.sock)
        peer.sock.close()
        if peer is not rank.main or rank.gone:
            return
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        kill_group(rank.pid)  # what the rank left behind, while its number is still taken
        _, status = os.waitpid(rank.pid, 0)
        self.ended(rank, os.waitstatus_to_exitcode(status))

    def ended(self, rank: Rank, code: int) -> None:
        """A rank's process is no more; ``code``: its exit status, or -N for signal N."""
        rank.gone = True
        self.alive -= 1
        rank.status = code if code >= 0 else 128 - code
        self.on_gone(rank, -code if code < 0 else 0)

    def on_gone(self, rank: Rank, signal_number: int) -> None:
        """A rank's process has ended; raises Failure if badly."""
        if signal_number:
            name = signal.Signals(signal_number).name
            raise Failure(f"{rank.text()} was killed by {name}", rank.status)
        if rank.status or not rank.left:
            place = f" after {rank.sites[-1]}" if rank.sites else ""
            how = (
                f"ended with exit status {rank.status}"
                if rank.status
                else "left without ending its program (os._exit?)"
            )
            raise Failure(f"{rank.text()} {how}{place}", rank.status or 1)

    def collect_traces(self) -> None:
        """Give up: ask the ranks that wait for us for their traces, briefly."""
        self.given_up = True
        for rank in self.ranks.values():
            if not rank.gone:
                for peer in rank.peers():
                    peer.send(("dump",))
        deadline = time.monotonic() + GRACE
        while any(r.trace is None and not r.gone for r in self.ranks.values()) and time.monotonic() < deadline:
            try:
                if not self.poll(0.2) and not self._any_awake():
                    break
            except PrismError:
                pass  # one more rank has gone while we give up

    def _any_awake(self) -> bool:
        return any(
            r.ask(process_state) not in ("S", "T") for r in self.ranks.values() if not r.gone and r.trace is None
        )

    def close(self) -> None:
        """End every rank process and close every socket; safe to call twice."""
        if self.nodes is not None:
            self.nodes.release()
        for rank in self.ranks.values():
            if not rank.gone:
                kill_group(rank.pid)
        for rank in self.ranks.values():
            if not rank.gone:
                os.waitpid(rank.pid, 0)
                rank.gone = True
                self.alive -= 1
            for peer in rank.peers():
                peer.close()
        self.selector.close()

    # --- messages

    def handle(self, rank: Rank, peer: wire.Peer, message: tuple, payload: memoryview, fds: list[int]) -> None:
        """Dispatch one message."""
        kind = message[0]
        if kind == "op":
            self.on_op(rank, peer, self._operation(rank, message, payload))
        elif kind == "wait":
            self.on_wait(rank, peer, message[1])
        elif kind == "test":
            self.on_test(rank, peer, message[1])
        elif kind == "watch":
            rank.watched.add(message[1])
            self.on_watch(rank, message[1])
        elif kind == "store":
            self._store(rank, peer, message[1], message[2])
        elif kind == "site":
            rank.sites.append(sys.intern(message[2]))  # the same texts in every rank
        elif kind == "group":
            self._group(rank, *message[1:])
        elif kind in ("channel", "push"):
            self._channel(rank, kind, wire.Peer(socket.socket(fileno=fds[0]), self.full))
        elif kind == "iteration":
            rank.iterations = message[1]
        elif kind == "trace":
            rank.trace = message[1]
        elif kind == "leave":
            rank.left = True
            self.on_leave(rank, peer)

    def _operation(self, rank: Rank, message: tuple, payload: memoryview) -> Operation:
        _, opid, node, slot, op, reduce, root, peer, tag, descs, inputs, site, issued, sync, factor, whole = message
        group = rank.slots[slot]
        place = rank.sites[site]
        issued = rank.place.clock.to_ours(issued)
        return Operation(
            opid, node, group, Op(op), Reduce(reduce), root, peer, tag, descs, inputs > 0, place, issued, sync, factor,
            whole, payload,
        )  # fmt: skip

    def _group(self, rank: Rank, slot: int, name: str, desc: str, backend: str, members: tuple[int, ...]) -> None:
        group = self.groups.get((name, members))
        if group is None:
            index = {member: k for k, member in enumerate(members)}
            group = Group(len(self.groups), name, desc, backend, members, index)
            self.groups[name, members] = group
        rank.slots.append(group)

    def _channel(self, rank: Rank, kind: str, peer: wire.Peer) -> None:
        rank.adopt(kind, peer)
        self._listen(rank, peer)

    def _store(self, rank: Rank, peer: wire.Peer, function: str, arguments: tuple) -> None:
        token = (rank.number, id(peer), peer)
        try:
            known, answer = self.store.call(rank.number, function, arguments, token)
        except (ValueError, TypeError) as error:
            peer.send(("error", f"store.{function}: {error}"))
            return
        if known:
            self.on_store_answer(rank, peer, function, arguments, answer)
        else:
            self.on_store_wait(rank, peer)
        self.release()

    def release(self) -> None:
        """Let those go whose store keys exist now."""
        for (number, _, waiting), value in self.store.released():
            self.on_store_ready(self.ranks[number], waiting, value)


def kill_group(pid: int) -> None:
    """SIGKILL a rank and whatever it has started."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # gone already, or not yet the leader of its own group


def process_state(pid: int) -> str:
    """One letter from /proc/PID/stat ("S": sleeping), "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
