"""One rank's capture: ties the tracer, the client and torch's hooks together, from the fork to the last trace."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from prism_tools.capture import wire
from prism_tools.capture.calls import Call
from prism_tools.capture.client import Client
from prism_tools.capture.trace import Tracer
from prism_tools.capture.work import RemoteWork
from prism_tools.graph.schema import PRETEND_CUDA, Op

if TYPE_CHECKING:
    from prism_tools.capture.ranks import Spec

SESSION: Any = None  # the process's own Session, set by start()


class Session:
    """State of one captured rank.

    ``sandbox``: the ranks that run for real beside this one with real backends between them (none while recording).
    ``stop_after``: iterations (groups of optimizer steps) after which the rank ends, or -1.
    ``issue_cost``: replay: arrivals are told as if tracing cost nothing and issuing op X cost this many ns; None: as they are.
    """

    tracing = True
    announces_groups = True
    callbacks_wait = True  # a slice does what was recorded, where futures are complete when their callbacks are added
    device = None
    pretends = False  # tensors say that they are on CUDA devices: they are the CPU's
    eager_sends = False  # the server buffers sends: nobody waits for them

    def __init__(
        self, client: Client, rank: int, sandbox: frozenset[int], stop_after: int, issue_cost: dict[int, int] | None
    ) -> None:
        self.client = client
        self.pid = os.getpid()
        self.rank = rank
        self.sandbox = sandbox
        self.stop_after = stop_after
        self.tracer = Tracer(issue_cost)
        self.compensate = issue_cost is not None
        self.pending_ranks: tuple[int, ...] = ()
        self.slots: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.iterations = 0
        self.callbacks: deque[int] = deque()  # those that backends' threads have yet to run
        self._announced_sites = 0
        self._after_mark = False
        client.on_dump = lambda: self.finish(1)

    def unknown(self, name: str, real: Any, args: tuple, kwargs: dict) -> Any:
        """An operation whose arguments tracing does not understand is not traced."""
        return real(*args, **kwargs)

    def prepare(self, spec: Spec) -> None:
        """Before the program runs: nothing to do."""

    def enter(self, rank: int, size: int) -> None:
        """The default group is made: nothing to do, tracing began with the process."""

    def made_group(self, name: str, ranks: tuple[int, ...]) -> None:
        """The program makes a group of these global ranks, which need not have this rank among them."""

    def last_words(self) -> dict[str, Any]:
        """What goes with the trace."""
        return {}

    def is_remote(self, ranks: tuple[int, ...]) -> bool:
        """Whether a group of these global ranks is played by the server."""
        return not self.sandbox.issuperset(ranks)

    def register(self, name: str, description: str, backend: str, ranks: tuple[int, ...]) -> int:
        """Slot of a group, told to the server once."""
        known = self.slots.get((name, backend, ranks))
        if known is not None:  # the program has destroyed its groups and made them again
            return known
        slot = self.slots[name, backend, ranks] = len(self.slots)
        self.client.post(("group", slot, name, description, backend, ranks))
        return slot

    def issue(self, call: Call, slot: int, called: int) -> int:
        """Trace an operation; the rank ends here when its last wanted iteration is over."""
        if self._after_mark:
            self._after_mark = False
            self.iterations += 1
            if self.client.announce:
                self.client.post(("iteration", self.iterations))
            if self.iterations == self.stop_after:
                self.finish(0)
        return self.tracer.comm(call, slot, called)

    def submit(self, call: Call, slot: int, node: int) -> RemoteWork:
        """Hand an operation to the server; never blocks."""
        eager = call.op is Op.SEND and self.eager_sends
        return RemoteWork(self, call, node, self.hand_over(call, slot, node, call.sync and not eager), eager)

    def hand_over(self, call: Call, slot: int, node: int, blocks: bool) -> int:
        """Tell the server of an operation, and what this rank contributes; ``blocks``: its caller waits at once. The opid."""
        sites = self.tracer.sites.texts
        while self._announced_sites < len(sites):
            self.client.post(("site", self._announced_sites, sites[self._announced_sites]))
            self._announced_sites += 1
        opid = self.client.new_id()
        issued = self.tracer.issued_at(node) - (self.tracer.debt if self.compensate else 0)
        descs = wire.descs_of(call.ins or call.outs) if call.op is not Op.BARRIER else []
        head = ("op", opid, node, slot, int(call.op), int(call.reduce), call.root, call.peer, call.tag)
        tail = (descs, len(call.ins), self.tracer.site_of(node), issued, blocks, call.factor, call.whole)
        self.client.post(head + tail, wire.pack(call.ins))
        return opid

    def step_done(self) -> None:
        """An optimizer step ended (torch's global hook)."""
        self.tracer.mark(Op.OPTIMIZER_STEP)
        self._after_mark = True

    def finish(self, status: int) -> None:
        """Send the trace, wait until the server lets go, and end the process."""
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() != self.pid:  # a child that the program forked itself
            os._exit(status)
        trace = self.tracer.export(self.rank, [ranks for *_, ranks in self.slots])
        trace["slots"] = list(self.slots)
        trace["rss"] = peak_rss()
        trace["status"] = status
        trace |= self.last_words()
        self.client.post(("trace", trace))
        self.client.request(("leave", status))
        os._exit(status)


def peak_rss() -> int:
    """Peak resident set of this process, bytes (VmHWM)."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return -1


def new_session(client: Client, spec: Spec) -> Session:
    """What captures a rank: with its peers, or by rules."""
    kind: type[Session] = Session
    if spec.rules is not None:
        kind = importlib.import_module("prism_tools.capture.ruled").RuledSession
    session = kind(client, spec.rank, spec.sandbox, spec.stop_after, spec.issue_cost)
    session.eager_sends = spec.eager_sends
    session.prepare(spec)
    return session


def start(client: Client, spec: Spec) -> Session:
    """Install capture in this process, before the user's program runs."""
    global SESSION
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from prism_tools.capture import groups, spawned
    from prism_tools.capture.store import PrismStore, serve_prefixes

    rank = spec.rank
    SESSION = session = new_session(client, spec)
    groups.install()
    spawned.install(session)
    if spec.device == PRETEND_CUDA:
        from prism_tools.capture import pretend_cuda

        session.pretends = True
        pretend_cuda.install()
    store = PrismStore(client)
    serve_prefixes()
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    lives = itertools.count()

    def handler(url: str, timeout: Any = None, **_: Any) -> Any:
        query = parse_qs(urlparse(url).query)
        given = int(query.get("rank", [str(rank)])[0])
        life = next(lives)  # a second one must not find the first one's keys: gloo would connect to addresses that were
        own = dist.PrefixStore(f"life{life}", store) if life else store
        yield own, given, int(query.get("world_size", [os.environ["WORLD_SIZE"]])[0])

    for scheme in ("env", "tcp", "file"):
        rendezvous._rendezvous_handlers[scheme] = handler  # type: ignore[attr-defined]

    class StoreName:
        """Stands for torch's stores; every one of them is the server's."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            return store

    for module in (dist, c10d, rendezvous):
        for name in ("TCPStore", "FileStore"):
            if hasattr(module, name):
                setattr(module, name, StoreName)
    register_optimizer_step_post_hook(lambda *_: session.step_done())
    seed(spec.entropy)
    os.register_at_fork(after_in_child=client.close)
    session.tracer.host_end = time.monotonic_ns()
    return session


def seed(entropy: int) -> None:
    """Seed the generators that a fresh process seeds from the system (a GPU's default seed is a constant)."""
    import torch

    random.seed(entropy)
    torch.default_generator.manual_seed(entropy)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(entropy & 0xFFFFFFFF)
