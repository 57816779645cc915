"""The layout of a file: Graph to a nested dict of numpy arrays and back (share/doc/prism/format.md)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from prism_tools.graph.fields import Fields, Tree, damaged, pack_bytes, pack_lists, pack_rows, pack_strings, split
from prism_tools.graph.model import Graph, Groups, Launch, Payload, Program, Ragged, Ranks, StoreLog, Values
from prism_tools.graph.results import RESULTS
from prism_tools.graph.schema import FORMAT, NODE_COLUMNS, STAGES, VALUE_COLUMNS, VERSION, ReduceOrder

PROVENANCE = ("id", "prev", "tool", "version", "argv")
RANK_COLUMNS = ("program", "values", "local_rank", "node")
REQUIRED = (
    "launch", "provenance", "environment", "groups", "programs", "values", "ranks", "lanes", "strings", "store",
    "payload",
)  # fmt: skip
PARTS = (*REQUIRED, *RESULTS)  # groups of this version, in file order; any other group is carried through unread


def to_tree(graph: Graph) -> Tree:
    """The nested dict of ``graph``, in file order. ``graph.unknown`` is not part of it."""
    tree: Tree = {
        "format": FORMAT,
        "version": VERSION,
        "stage": graph.stage,
        "world_size": graph.world_size,
        "complete": graph.complete,
        "launch": _launch_tree(graph.launch),
        "provenance": {key: pack_strings(row[key] for row in graph.provenance) for key in PROVENANCE},
        "environment": {"json": pack_strings([json.dumps(graph.environment, sort_keys=True)])},
        "groups": {
            **{key: pack_strings(getattr(graph.groups, key)) for key in ("name", "desc", "backend")},
            "members": pack_rows(graph.groups.members, "i4"),
        },
        "programs": _programs_tree(graph.programs),
        "values": _values_tree(graph.values),
        "ranks": {
            **{name: np.asarray(getattr(graph.ranks, name), "i4") for name in RANK_COLUMNS},
            "slots": pack_rows(graph.ranks.slots, "i4"),
            **({} if graph.ranks.ran is None else {"ran": np.asarray(graph.ranks.ran, "i4")}),
        },
        "lanes": pack_strings(graph.lanes),
        "strings": pack_strings(graph.strings),
        "store": {
            "rank": np.asarray(graph.store.rank, "i4"),
            "op": pack_strings(graph.store.op),
            "key": pack_strings(graph.store.key),
            "value": pack_bytes(graph.store.value),
        },
        "payload": {key: getattr(graph.payload, key) for key in ("uuid", "path", "mode", "bytes")},
    }
    for name, (pack, _) in RESULTS.items():
        part = getattr(graph, name)
        if part is not None:
            tree[name] = pack(part)
    return tree


def from_tree(tree: Tree) -> Graph:
    """The graph of a nested dict; PrismError names the first thing that is missing or has another type or shape."""
    root = Fields(tree)
    world_size = root.integer("world_size")
    if world_size < 1:
        raise damaged("@world_size", f"is {world_size}")
    stage = root.text("stage")
    if stage not in STAGES:
        raise damaged("@stage", f"is {stage!r}")
    programs = _programs(root.group("programs"))
    graph = Graph(
        stage=stage,
        world_size=world_size,
        launch=_launch(root.group("launch"), world_size),
        groups=_groups(root.group("groups")),
        programs=programs,
        values=_values(root.group("values")),
        ranks=_ranks(root.group("ranks"), world_size),
        lanes=root.strings("lanes"),
        strings=root.strings("strings"),
        store=_store(root.group("store")),
        payload=_payload(root.group("payload")),
        provenance=_provenance(root.group("provenance")),
        environment=_environment(root.group("environment")),
        complete=root.flag("complete"),
    )
    for name, (_, unpack) in RESULTS.items():
        if name in root:
            setattr(graph, name, unpack(root.group(name), world_size))
    return graph


def _launch_tree(launch: Launch) -> Tree:
    names = sorted(launch.env)
    scalars = ("cwd", "python", "nproc_per_node", "device", "backend", "hash_seed", "warmup", "stop_after")
    return {
        **{name: getattr(launch, name) for name in scalars},
        "reduce_order": str(launch.reduce_order),
        "foreign_owner": launch.foreign_owner,
        "argv": pack_strings(launch.argv),
        "env_name": pack_strings(names),
        "env_value": pack_strings(launch.env[name] for name in names),
        "entropy": np.asarray(launch.entropy, "u8"),
    }


def _launch(group: Fields, world_size: int) -> Launch:
    names = group.strings("env_name")
    return Launch(
        argv=group.strings("argv"),
        cwd=group.text("cwd"),
        env=dict(zip(names, group.strings("env_value", len(names)), strict=True)),
        python=group.text("python"),
        nproc_per_node=group.integer("nproc_per_node"),
        device=group.text("device"),
        backend=group.text("backend"),
        hash_seed=group.integer("hash_seed"),
        entropy=group.array("entropy", "u8", world_size),
        warmup=group.integer("warmup"),
        stop_after=group.integer("stop_after"),
        reduce_order=_reduce_order(group),
        foreign_owner=group.integer("foreign_owner"),
    )


def _reduce_order(group: Fields) -> ReduceOrder:
    if "reduce_order" not in group:
        return ReduceOrder.RANK
    name = group.text("reduce_order")
    if name not in list(ReduceOrder):
        raise damaged(f"{group.path}@reduce_order", "is no order")
    return ReduceOrder(name)


def _provenance(group: Fields) -> list[dict[str, str]]:
    count = len(group.strings("id"))
    columns = [group.strings(key, count) for key in PROVENANCE]
    return [dict(zip(PROVENANCE, row, strict=True)) for row in zip(*columns, strict=True)]


def _environment(group: Fields) -> dict[str, Any]:
    try:
        value = json.loads(group.strings("json", 1)[0])
    except ValueError:
        raise damaged(f"{group.path}/json", "is not JSON") from None
    if not isinstance(value, dict):
        raise damaged(f"{group.path}/json", "is not a JSON object")
    return value


def _groups(group: Fields) -> Groups:
    members = group.rows("members", "i4")
    name, desc, backend = (group.strings(key, len(members)) for key in ("name", "desc", "backend"))
    return Groups(name, desc, backend, members)


def _programs_tree(programs: list[Program]) -> Tree:
    columns = {name: ([p.columns[name] for p in programs], dtype) for name, dtype in NODE_COLUMNS.items()}
    edges = [p.edges.reshape(-1, 2) for p in programs]
    return {
        **pack_lists(columns),
        "edge_offset": np.concatenate([[0], np.cumsum([len(e) for e in edges])]).astype(np.int64),
        "edges": np.concatenate([np.empty((0, 2), np.int32), *edges]).astype(np.int32),
    }


def _programs(group: Fields) -> list[Program]:
    columns = group.lists(NODE_COLUMNS)
    count = len(columns["kind"])
    edges = group.array("edges", "i4", width=2)
    edge_rows = split(group.offset(len(edges), count, "edge_offset"), edges)
    return [Program({name: columns[name][p] for name in columns}, edge_rows[p]) for p in range(count)]


def _values_tree(values: list[Values]) -> Tree:
    columns = {name: ([v.columns[name] for v in values], dtype) for name, dtype in VALUE_COLUMNS.items()}
    starts = np.cumsum([0, *(len(v.splits.data) for v in values)])
    offsets = [v.splits.offset[:-1] + start for v, start in zip(values, starts, strict=False)]
    splits = {
        "offset": np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
        "data": np.concatenate([np.empty(0, np.int64), *(v.splits.data for v in values)]).astype(np.int64),
    }
    return {**pack_lists(columns), "splits": splits}


def _values(group: Fields) -> list[Values]:
    columns = group.lists(VALUE_COLUMNS)
    lengths = [len(row) for row in columns["bytes"]]
    splits = group.rows("splits", "i8", sum(lengths))
    result, first = [], 0
    for v, length in enumerate(lengths):
        offset = splits.offset[first : first + length + 1]
        own = Ragged(offset - offset[0], splits.data[offset[0] : offset[-1]])
        result.append(Values({name: columns[name][v] for name in columns}, own))
        first += length
    return result


def _ranks(group: Fields, world_size: int) -> Ranks:
    columns = {name: group.array(name, "i4", world_size) for name in RANK_COLUMNS}
    ran = group.array("ran", "i4", world_size) if "ran" in group else None
    return Ranks(slots=group.rows("slots", "i4", world_size), ran=ran, **columns)


def _store(group: Fields) -> StoreLog:
    rank = group.array("rank", "i4")
    return StoreLog(
        rank, group.strings("op", len(rank)), group.strings("key", len(rank)), group.bytes("value", len(rank))
    )


def _payload(group: Fields) -> Payload:
    return Payload(group.text("uuid"), group.text("path"), group.text("mode"), group.integer("bytes"))
