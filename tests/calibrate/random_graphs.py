"""Random programs that can run, with random durations: what the properties of solver and condensation are tried on."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from prism_tools.graph.match import Matches
from prism_tools.graph.model import Durations, Graph
from prism_tools.graph.schema import Kind, Match, Source
from tests.graph.builder import Node, build, comm, compute, step, wait

COLLECTIVES = ("all_reduce", "all_gather", "barrier", "broadcast", "scatter", "reduce", "gather")


def random_graph(rng: random.Random, ranks: int = 0, events: int = 0, iterations: int = 2) -> Graph:
    """Events are drawn in one global order, so that no two ranks wait for each other."""
    ranks = ranks or rng.randint(1, 6)
    events = events or rng.randint(1, 12)
    groups = {"world": list(range(ranks))}
    for k in range(rng.randint(0, 3)):
        groups[f"g{k}"] = sorted(rng.sample(range(ranks), rng.randint(1, ranks)))
    nodes: list[list[Node]] = [[] for _ in range(ranks)]
    waiting: list[list[str]] = [[] for _ in range(ranks)]
    for _ in range(iterations):
        for k in range(events):
            if ranks > 1 and rng.random() < 0.35:
                _send(rng, nodes, waiting, ranks)
            else:
                _collective(rng, nodes, waiting, groups, f"c{k}.{rng.random()}")
            for rank in range(ranks):
                if waiting[rank] and rng.random() < 0.3:
                    _wait(nodes[rank], waiting[rank])
        for rank in range(ranks):
            if waiting[rank]:
                _wait(nodes[rank], waiting[rank])
            nodes[rank] += [compute(), step()]
    return build(ranks, groups, lambda rank: nodes[rank])


def random_replicas(rng: random.Random) -> tuple[Graph, int]:
    """A random program of a few ranks in some copies: rank c * n + r is copy c of rank r. Returns the graph and n.

    Groups are within a copy, across all copies of a rank, or all ranks; copies also pass things round in a ring.
    """
    count, copies = rng.randint(1, 4), rng.randint(1, 5)
    across = {f"dp{r}": [c * count + r for c in range(copies)] for r in range(count)}
    within = {f"mp{c}": [c * count + r for r in range(count)] for c in range(copies)}
    groups = {"world": list(range(count * copies)), **across, **within}
    nodes: list[list[Node]] = [[] for _ in range(count * copies)]
    waiting: list[list[str]] = [[] for _ in nodes]
    for k in range(2 * rng.randint(1, 5)):
        kind, r, op = rng.choice(("world", "dp", "mp", "pair", "ring")), rng.randrange(count), rng.choice(COLLECTIVES)
        root, later, peer = rng.random(), rng.random() < 0.4, (r + 1) % count
        for c in range(copies):
            if kind == "pair" and count > 1:
                _pass_on(nodes, f"mp{c}", c * count + r, c * count + peer, f"p{k}.{c}")
            elif kind == "ring" and copies > 1:
                _pass_on(nodes, f"dp{r}", c * count + r, (c + 1) % copies * count + r, f"p{k}.{c}", waiting, batch=k)
        chosen = {"world": ["world"], "dp": [f"dp{r}"], "mp": list(within)}.get(kind, [])
        for group in chosen:
            members = groups[group]
            rooted = members[int(root * len(members))] if op in ("broadcast", "scatter", "reduce", "gather") else -1
            for rank in members:
                nodes[rank] += [compute(), comm(op, group, 64, root=rooted, name=f"c{k}", is_async=later)]
                if later:
                    waiting[rank].append(f"c{k}")
        if k % 2:
            for rank, mine in enumerate(nodes):
                _wait(mine, waiting[rank])
                mine += [compute(), step()]
    return build(len(nodes), groups, lambda rank: nodes[rank], rng.choice(("gloo", "nccl"))), count


def _pass_on(
    nodes: list, group: str, source: int, target: int, name: str, waiting: list | None = None, batch: int = -1
) -> None:
    """A send with its receive; with ``waiting`` asynchronous ones, else both block."""
    later = waiting is not None
    for rank, op, peer in ((source, "send", target), (target, "recv", source)):
        nodes[rank] += [compute(), comm(op, group, 64, peer=peer, name=op + name, is_async=later, batch=batch)]
        if waiting is not None:
            waiting[rank].append(op + name)


def _wait(mine: list[Node], names: list[str]) -> None:
    mine += [compute(), wait(*names)]
    names.clear()


def _collective(rng: random.Random, nodes: list, waiting: list, groups: dict, name: str) -> None:
    group, op = rng.choice(sorted(groups)), rng.choice(COLLECTIVES)
    root = rng.choice(groups[group]) if op in ("broadcast", "scatter", "reduce", "gather") else -1
    for rank in groups[group]:
        later = rng.random() < 0.4
        nodes[rank] += [compute(), comm(op, group, 64, root=root, name=name, is_async=later)]
        if later:
            waiting[rank].append(name)


def _send(rng: random.Random, nodes: list, waiting: list, ranks: int) -> None:
    source, target = rng.sample(range(ranks), 2)
    name = f"p{rng.random()}"
    for rank, op, peer in ((source, "send", target), (target, "recv", source)):
        later = rng.random() < 0.4
        nodes[rank] += [compute(), comm(op, "world", 64, peer=peer, name=name, is_async=later)]
        if later:
            waiting[rank].append(name)


def make_eager(rng: random.Random, matches: Matches) -> None:
    """Turn some pairs into eager ones, which no backend makes by itself."""
    for match in np.flatnonzero(matches.kind == Match.PAIR):
        if rng.random() < 0.5:
            matches.kind[match] = Match.EAGER


def random_durations(rng: random.Random, graph: Graph, matches: Matches, most: int = 1000) -> Durations:
    """One row a rank; small numbers, so that ties happen."""
    own, tail, spread, source = [], [], [], []
    of_match: dict[int, int] = {}
    for rank in range(graph.world_size):
        program, base = graph.program_of(rank), int(matches.base[rank])
        mine = [rng.randint(0, most) if kind in (Kind.COMPUTE, Kind.WAIT) else 0 for kind in program.kind]
        tails = [0] * len(mine)
        for node in np.flatnonzero(program.kind == Kind.COMM).tolist():
            match = int(matches.of_node[base + node])
            mine[node] = of_match.setdefault(match, rng.randint(0, most))
            tails[node] = rng.choice((0, 0, rng.randint(0, most // 10)))
        own.append(np.array(mine, np.int64))
        tail.append(np.array(tails, np.int64))
        spread.append(np.zeros(len(mine), np.int64))
        source.append(np.full(len(mine), Source.REAL, np.uint8))
    return Durations(np.arange(graph.world_size, dtype=np.int32), own, tail, spread, spread, source)


def periodic_graph(rng: random.Random, iterations: int, ranks: int = 0, events: int = 0) -> Graph:
    """The same random iteration again and again; what is still under way at its end is waited for in the next one."""
    ranks = ranks or rng.randint(1, 5)
    groups = {"world": list(range(ranks))}
    for k in range(rng.randint(0, 2)):
        groups[f"g{k}"] = sorted(rng.sample(range(ranks), rng.randint(1, ranks)))
    once: list[list[Node]] = [[] for _ in range(ranks)]
    waiting: list[list[str]] = [[] for _ in range(ranks)]
    for k in range(events or rng.randint(0, 5)):
        if ranks > 1 and rng.random() < 0.6:
            _send(rng, once, waiting, ranks)
        else:
            _collective(rng, once, waiting, groups, f"c{k}.{rng.random()}")
        for rank in range(ranks):
            if waiting[rank] and rng.random() < 0.3:
                _wait(once[rank], waiting[rank])
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]  # critical cycles through several iterations
    some = [tuple(rng.sample(range(ranks), 2)) for _ in range(rng.randint(0, 3))] if ranks > 1 else []
    for k, (source, target) in enumerate(ring if ranks > 1 and rng.random() < 0.5 else some):
        # sent at the end, received from the beginning on
        once[target][:0] = [
            comm("recv", "world", 64, peer=source, name=f"late{k}", tag=k + 1, is_async=True),
            compute(),
        ]
        once[source] += [compute(), comm("send", "world", 64, peer=target, name=f"sent{k}", tag=k + 1, is_async=True)]
        waiting[target].append(f"late{k}")

    def nodes(rank: int) -> list[Node]:
        mine: list[Node] = []
        for k in range(iterations):
            late = [f"{name}#{k - 1}" for name in waiting[rank]] if k else []
            mine += [compute(), wait(*late)]
            for node in once[rank]:
                mine.append(replace(node, name=f"{node.name}#{k}", waits=tuple(f"{name}#{k}" for name in node.waits)))
            mine += [compute(), step()]
        return mine

    return build(ranks, groups, nodes)


def periodic_durations(rng: random.Random, graph: Graph, matches: Matches, most: int = 1000) -> Durations:
    """Durations that are the same in every iteration of a periodic graph."""
    drawn = random_durations(rng, graph, matches, most)
    slow = rng.choice((1, 1, 10))  # communication
    for rank in range(graph.world_size):
        drawn.own[rank][graph.program_of(rank).kind == Kind.COMM] *= slow
        length = len(graph.program_of(rank)) // graph.iterations()
        for rows in (drawn.own, drawn.tail):
            rows[rank] = np.tile(rows[rank][:length], graph.iterations())
    return drawn
