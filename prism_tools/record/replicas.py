"""One run for many ranks that do the same: which ranks these are, proof by sample, and the traces of those that did not run.

A hypothesis is a set of process groups that part the world (such as the data-parallel groups): all members of one of them do
the same, on groups of their own. Every rank makes every group, so one run tells the groups of all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from prism_tools.capture import ranks
from prism_tools.capture.server import Group
from prism_tools.errors import PrismError
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import Kind, Op
from prism_tools.record.alone import Alone
from prism_tools.record.build import ARRAYS

SAMPLES = 8  # at most as many skipped ranks are run all the same, and compared; of few, an eighth
Membership = tuple[str, tuple[int, ...]]  # a group: name, global ranks


class Replicas:
    """Runs what must be run of ``world`` ranks. ``groups``: those whose members do the same, [] if there are none."""

    def __init__(
        self, coordinator: Alone, spec_of: Callable[[int], ranks.Spec], world: int, tick: Callable[[], None]
    ) -> None:
        self._coordinator, self._spec_of, self._world, self._tick = coordinator, spec_of, world, tick
        self._belonging: dict[int, dict[int, list[Membership]]] = {}  # by a table's id: rank → its groups, in order
        self.groups: list[tuple[int, ...]] = []
        self.compared: list[int] = []  # ranks that were run although another one stands for them
        self.apart: list[int] = []  # those of them whose sizes differ
        self.difference = "there are no groups that part all ranks"  # why the last hypothesis was wrong

    def run(self) -> None:
        """Run one rank of each class, and the sample. PrismError: as for Coordinator.run."""
        self._run([0])
        for groups in partitions(self._coordinator.memberships[0], self._world):
            if self._holds(groups):
                self.groups = groups
                return
        self._run(list(range(self._world)))

    def name(self) -> str:
        """What the groups are called: "world", a description, or a name."""
        for group in self._coordinator.ranks[0].slots:
            if self.groups and group.members == self.groups[0]:
                return group.label().rsplit(" [", 1)[0]
        return "process"

    def traces(self) -> dict[int, dict[str, Any]]:
        """The traces of all ranks; groups that no rank of its own has announced become known to the coordinator."""
        done = self._coordinator.ranks
        traces = {number: rank.trace for number, rank in done.items() if rank.trace is not None}
        for members in self.groups:
            for rank in members[1:]:
                if rank not in traces:
                    slots = self._slots(members[0], rank)
                    assert slots is not None
                    self._announce(members[0], slots)
                    traces[rank] = traces[members[0]] | {"slots": slots, "ran": members[0]}
        return traces

    def _run(self, wanted: list[int]) -> None:
        new = [rank for rank in wanted if rank not in self._coordinator.ranks]
        try:
            self._coordinator.run_all(map(self._spec_of, new), self._tick)
        except PrismError as problem:
            if self._coordinator.store.waiting:
                problem.detail += "\na rank that was not run may be the one that sets it; leave --dedup out"
            raise

    def _holds(self, groups: list[tuple[int, ...]]) -> bool:
        """Whether all members of each group do the same, as far as a sample shows: first one, then the first of every group
        and others, of different groups and places."""
        self.compared, self.apart = [], []
        if not self._compare([(groups[0][0], groups[0][-1])]):
            return False
        self._run([members[0] for members in groups])
        if not all(self._slots(members[0], rank) for members in groups for rank in members[1:]):
            self.difference = "not every rank made the groups of the others"
            return False
        skipped = [(members[0], rank) for members in groups for rank in members[1:]]
        chance = random.Random(len(skipped))  # the same ranks every time
        return self._compare(chance.sample(skipped, min(SAMPLES, len(skipped) // 8)))

    def _compare(self, pairs: list[tuple[int, int]]) -> bool:
        self._run([rank for pair in pairs for rank in pair])
        for first, rank in pairs:
            self.difference = self._differs(first, rank)
            if self.difference:
                return False
            self.compared.append(rank)
            own, theirs = (self._coordinator.ranks[number].trace or {} for number in (first, rank))
            if any(not np.array_equal(own[name], theirs[name]) for name in ARRAYS):
                self.apart.append(rank)
        return True

    def _differs(self, first: int, rank: int) -> str:
        """The first node at which two ranks' programs differ, in words; "" if they are the same."""
        own, theirs = (self._coordinator.ranks[number].trace for number in (first, rank))
        assert own is not None and theirs is not None
        node = first_difference(own, theirs)
        if node >= 0:
            return (
                f"ranks {first} and {rank} differ first at node {node}: {text_of(own, node)}, {text_of(theirs, node)}"
            )
        if tuple(theirs["slots"]) != self._slots(first, rank):
            return f"ranks {first} and {rank} use groups that do not correspond"
        return ""

    def _of(self, table: tuple[Membership, ...]) -> dict[int, list[Membership]]:
        found = self._belonging.get(id(table))
        if found is None:
            found = self._belonging[id(table)] = {}
            for membership in dict.fromkeys(table):
                for rank in membership[1]:
                    found.setdefault(rank, []).append(membership)
        return found

    def _slots(self, first: int, rank: int) -> tuple | None:
        """The slots of ``rank``, on whose behalf ``first`` ran; None where their groups do not correspond."""
        belonging = self._of(self._coordinator.memberships[first])
        own, theirs = belonging[first], belonging.get(rank, [])
        if [len(group[1]) for group in own] != [len(group[1]) for group in theirs]:
            return None
        trace = self._coordinator.ranks[first].trace
        assert trace is not None
        counterpart = dict(zip(own, theirs, strict=True))
        slots = []
        for name, backend, members in trace["slots"]:
            if (name, members) not in counterpart:
                return None
            other = counterpart[name, members]
            slots.append((other[0], backend, other[1]))
        return tuple(slots)

    def _announce(self, first: int, slots: tuple) -> None:
        known = self._coordinator.groups
        for mine, (name, backend, members) in zip(self._coordinator.ranks[first].slots, slots, strict=True):
            if (name, members) not in known:
                index = {member: k for k, member in enumerate(members)}
                known[name, members] = Group(len(known), name, mine.desc, backend, members, index)


def partitions(table: tuple[Membership, ...], world: int) -> list[list[tuple[int, ...]]]:
    """Sets of equally large groups, of two or more ranks, that have every rank once; the largest groups first."""
    open_: list[tuple[int, set[int], list[tuple[int, ...]]]] = []
    for ranks_ in dict.fromkeys(tuple(sorted(members)) for _, members in table):
        if len(ranks_) < 2 or world % len(ranks_):
            continue
        for size, seen, groups in open_:
            if size == len(ranks_) and seen.isdisjoint(ranks_):
                seen.update(ranks_)
                groups.append(ranks_)
                break
        else:
            open_.append((len(ranks_), set(ranks_), [ranks_]))
    whole = [sorted(groups) for _, seen, groups in open_ if len(seen) == world]
    return sorted(whole, key=lambda groups: -len(groups[0]))


def first_difference(own: dict[str, Any], theirs: dict[str, Any]) -> int:
    """The first node at which two traces differ, sizes apart; -1 if none. Tags say which send a receive is for."""
    lengths = [len(trace["columns"]["kind"]) for trace in (own, theirs)]
    common = min(lengths)
    places = np.flatnonzero(own["tag"][:common] != theirs["tag"][:common])[:1].tolist()
    for name, column in own["columns"].items():
        other = theirs["columns"][name]
        if other is not column:
            mine, its = ((_sites(t) if name == "callsite" else t["columns"][name])[:common] for t in (own, theirs))
            places += np.flatnonzero(mine != its)[:1].tolist()
    if lengths[0] != lengths[1]:
        places.append(common)
    if not np.array_equal(own["edges"], theirs["edges"]):
        places.append(_first_edge(own["edges"], theirs["edges"], common))
    if own["sites"] != theirs["sites"] and not places:
        places += np.flatnonzero(_sites(own) != _sites(theirs))[:1].tolist()
    return min(places, default=-1)


def _first_edge(own: np.ndarray, theirs: np.ndarray, nodes: int) -> int:
    """The first target node whose edges differ."""
    sets = [{tuple(edge) for edge in edges.tolist()} for edges in (own, theirs)]
    return min((target for _, target in sets[0] ^ sets[1]), default=nodes)


def _sites(trace: dict[str, Any]) -> np.ndarray:
    texts = np.array([*trace["sites"], ""], object)
    return texts[trace["columns"]["callsite"]]


def text_of(trace: dict[str, Any], node: int) -> str:
    """A node in words: "all_reduce (train.py:41 step)", "send, tag 3 (train.py:50 step)"."""
    columns = trace["columns"]
    if node >= len(columns["kind"]):
        return "the end"
    kind, op = int(columns["kind"][node]), int(columns["op"][node])
    name = (Op(op) if kind in (Kind.COMM, Kind.MARK) else Kind(kind)).name.lower()
    if trace["tag"][node] >= 0:
        name += f", tag {trace['tag'][node]}"
    site = _sites(trace)[node]
    return f"{name} ({site})" if site else name


def summary(replicas: Replicas, world: int, run: int) -> str:
    """Which ranks of ``world`` were ``run``, and for whom; what is shown, and of how many it is only taken to be so."""
    if not replicas.groups:
        return f"no groups have members that do the same ({replicas.difference}); all {world:,} ranks were run"
    text = f"one rank of each {replicas.name()} group stands for the others; {run:,} of {world:,} ranks were run"
    text += f", {len(set(replicas.compared))} of them to compare: the same nodes"
    if replicas.apart:
        text += f", but other sizes on ranks {ranks_text(replicas.apart)}: others are given those of their first"
    if run < world:
        text += f"; that {world - run:,} do the same is taken from this sample"
    return text
