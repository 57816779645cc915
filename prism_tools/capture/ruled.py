"""A rank that runs without its peers: every operation is answered at once, in the rank, by the user's rules (P§5.2)."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed.distributed_c10d as c10d

from prism_tools.capture.calls import Call, densified
from prism_tools.capture.session import Session
from prism_tools.capture.store import PrismStore
from prism_tools.capture.wire import dtype_name
from prism_tools.capture.work import RemoteWork, TracedFuture
from prism_tools.graph.schema import ROOTED, Op
from prism_tools.tensors.generate import Received, fill
from prism_tools.tensors.refusals import refusal
from prism_tools.tensors.rules import OBJECT_CALLS, SELF, Occasion, may_be_invented

if TYPE_CHECKING:
    from prism_tools.capture.ranks import Spec

Row = tuple[
    int, str, str, str, str
]  # rule (UNRULED: none, INVENTED: none is needed), operation, group, dtype, call site
UNRULED, INVENTED = -1, -2


class RuledWork(RemoteWork):
    """A Work that is complete. Its Future is settled as the coordinator's would be: waits are the same nodes."""

    def get_future(self) -> TracedFuture:
        if self._future is None:
            self._future = TracedFuture(self)
            if self._call.op is not Op.SEND:  # which is complete when it is recorded, too
                self._queue_wait()
            self._settle(self._future)
        return self._future

    def came_from(self, peer: int) -> None:
        """A receive from any rank is one from group rank ``peer``."""
        self._source = peer
        self._session.tracer.source(self._node, peer)

    def fail(self, text: str) -> None:
        """The group's backend would refuse the operation."""
        self._problem = RuntimeError(text)


class RuledSession(Session):
    """Captures a rank alone. ``lenient``: what no rule answers is answered by "self", and only counted.

    ``answered``: what each rule answered: [times, least bytes, most bytes]; ``memberships``: every group of the world that
    the program has made, its own or not: (name, ranks), in order.
    """

    def prepare(self, spec: Spec) -> None:
        """No barrier waits for ranks that are not there."""
        assert spec.rules is not None
        self.rules, self.lenient = spec.rules, spec.lenient
        c10d._store_based_barrier = lambda *_, **__: None  # type: ignore[attr-defined]
        PrismStore.barrier = lambda *_, **__: None  # type: ignore[assignment]
        self.answered: dict[Row, list[int]] = {}
        self.memberships: list[tuple[str, tuple[int, ...]]] = []
        self._titles: list[tuple[str, str]] = []  # description and name, by slot
        self._counts: Counter[tuple[int, Op]] = Counter()

    def made_group(self, name: str, ranks: tuple[int, ...]) -> None:
        self.memberships.append((name, ranks))

    def register(self, name: str, description: str, backend: str, ranks: tuple[int, ...]) -> int:
        slot = super().register(name, description, backend, ranks)
        if slot == len(self._titles):
            title = "world" if description == "default_pg" else description
            self._titles.append((title if title not in ("", "undefined") else name, name))
        return slot

    def submit(self, call: Call, slot: int, node: int) -> RuledWork:
        """Tell the server what this rank contributes, and receive at once what the rules say."""
        opid = self.hand_over(call, slot, node, False)
        work = RuledWork(self, call, node, opid, True)
        _, backend, ranks = list(self.slots)[slot]
        dtype = dtype_name((call.ins or call.outs)[0].dtype) if call.ins or call.outs else ""
        refused = refusal(backend, call.op, call.reduce, dtype)
        if refused:
            work.fail(refused)
        else:
            sender = self._answer(call, slot, node, ranks)
            if sender != call.peer:
                work.came_from(sender)
        return work

    def _answer(self, call: Call, slot: int, node: int, ranks: tuple[int, ...]) -> int:
        """Fill the results; the group rank of a receive's sender, which a hook names where the call does not, else -1."""
        me = ranks.index(self.rank)
        ordinal = self._counts[slot, call.op]
        self._counts[slot, call.op] += 1
        receives = call.op not in ROOTED or call.root == me or call.op in (Op.BROADCAST, Op.SCATTER)
        anyone = call.op is Op.RECV and call.peer < 0
        if not receives or not (anyone or any(out.numel() for out in call.outs)):
            return call.peer
        names = (call.op.name.lower(), *_object_call())
        size = sum(tensor.numel() * tensor.element_size() for tensor in call.ins or call.outs)
        dtype = dtype_name(call.outs[0].dtype)
        site = self.tracer.sites.texts[self.tracer.site_of(node)]
        occasion = Occasion(names, self._titles[slot], ordinal, dtype, size, site)
        index = -1
        if len(ranks) > 1 and not (call.op is Op.SCATTER and call.ins):  # whose root has its own part
            index = self._rule(occasion, anyone)
        generator = SELF if index < 0 else self.rules.rules[index].generator
        received = Received(
            call.op, call.ins, call.outs, call.reduce, call.factor, call.root, call.peer, self.rank, ranks, occasion
        )
        try:
            with torch.no_grad():
                fill(received, generator)
            if anyone and index >= 0 and not (0 <= received.peer < len(ranks) and received.peer != me):
                raise ValueError(f"does not set call.peer to the group rank of a sender: {received.peer}")
        except Exception as error:  # a hook may raise anything
            line = f"line {self.rules.rules[index].line}: {generator.text}" if index >= 0 else "no rule"
            self.refuse(occasion, f"{self.rules.path}: {line}: {_one_line(error)}")
        if call.given and call.given[0].is_sparse:
            densified(call)
        return received.peer if anyone else call.peer

    def _rule(self, occasion: Occasion, anyone: bool) -> int:
        """Which rule answers, counted; -1: none. ``anyone``: a receive from any rank, whose sender only a hook can name."""
        index = self.rules.find(occasion)
        if anyone and index >= 0 and self.rules.rules[index].generator.kind != "python":
            index = UNRULED
        invented = index < 0 and not anyone and may_be_invented(occasion)
        self._count(INVENTED if invented else index, occasion)
        if index < 0 and not (self.lenient or invented):
            why = "no rule answers it, and integers and payloads of 64 KiB or less are never invented"
            if anyone:
                why = "who sends is not known; add a rule with a hook (python:MODULE:FUNCTION) that sets call.peer"
            self.refuse(occasion, why)
        return index

    def _count(self, index: int, occasion: Occasion) -> None:
        row = (index, occasion.calls[-1], occasion.groups[0], occasion.dtype, occasion.site)
        seen = self.answered.setdefault(row, [0, occasion.size, occasion.size])
        self.answered[row] = [seen[0] + 1, min(seen[1], occasion.size), max(seen[2], occasion.size)]

    def refuse(self, occasion: Occasion, why: str) -> NoReturn:
        """Have the server end the recording with one line; does not return."""
        what = f"{occasion.calls[-1]} {occasion.size:,} B {occasion.dtype} on {occasion.groups[0]}"
        self.client.request(("refused", f"rank {self.rank}: {what} #{occasion.ordinal} ({occasion.site}): {why}"))
        raise AssertionError("the server does not answer this")

    def last_words(self) -> dict[str, Any]:
        return {"answered": self.answered, "memberships": self.memberships}


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _object_call() -> tuple[str, ...]:
    """torch's object function on the stack: (its name,), or ()."""
    frame = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name in OBJECT_CALLS and code.co_filename.endswith("distributed_c10d.py"):
            return (code.co_name,)
        frame = frame.f_back  # type: ignore[assignment]
    return ()
