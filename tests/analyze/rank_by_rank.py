"""What reports say, worked out rank by rank and match by match: what those that look at classes of ranks must equal."""

from collections import Counter

import numpy as np

from prism_tools.analyze.tables import Filter
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import find_matches
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.releases import releases
from prism_tools.graph.schema import Kind, Match


def times(graph, matches):
    """Start, end of waiting and end of every flat node."""
    timeline, empty = graph.timeline, [np.empty(0, np.int64)]
    start, end = (np.concatenate([*empty, *(rows[k] for k in timeline.row)]) for rows in (timeline.start, timeline.end))
    held = start.copy()
    for match in range(len(matches)):
        for arrivals, leavers in releases(graph, matches, match):
            held[leavers] = start[arrivals].max()
    for rank in range(graph.world_size):
        program, base = graph.program_of(rank), int(matches.base[rank])
        for source, target in program.edges.tolist():
            if program.kind[target] == Kind.WAIT and program.kind[source] == Kind.COMM:
                held[base + target] = max(held[base + target], end[base + source])
    return start, held, end


def lateness(graph, matches):
    """Match → (flat node that arrived last, ns after the lower median)."""
    start, chosen, found = times(graph, matches)[0], counted(graph), {}
    for match in np.flatnonzero(matches.kind == Match.COLLECTIVE).tolist():
        members = matches.members[match].tolist()
        segment = graph.program_of(matches.rank_of(members[0])).segment[matches.node_of(members[0])]
        if len(members) > 1 and (not len(chosen) or segment in chosen):
            arrivals = [int(start[member]) for member in members]
            median = sorted(arrivals)[(len(arrivals) - 1) // 2]
            found[match] = members[arrivals.index(max(arrivals))], max(arrivals) - median
    return found


def straggler(graph):
    """(rank, total, times, joined, site), or None."""
    matches = find_matches(graph, strict=False)
    late, cost, often, sites = lateness(graph, matches), Counter(), Counter(), {}
    for last, lag in late.values():
        if lag:
            rank = matches.rank_of(last)
            cost[rank] += lag
            often[rank] += 1
            sites.setdefault(rank, Counter())[callsite_text(graph, rank, matches.node_of(last))] += lag
    if not cost:
        return None
    rank, total = cost.most_common(1)[0]
    mine = matches.of_node[matches.base[rank] : matches.base[rank + 1]]
    joined = len(set(mine.tolist()) & set(late))
    return rank, total, often[rank], joined, sites[rank].most_common(1)[0][0]


def groups(graph, **chosen):
    """The table of groups."""
    which, matches, rows = Filter(graph, **chosen), find_matches(graph, strict=False), []
    start, held, end = times(graph, matches)
    late, wanted = lateness(graph, matches), set()
    for rank in which.ranks:
        wanted |= set((matches.base[rank] + which.nodes(rank)).tolist())
    for group, members in enumerate(graph.groups.members):
        numbers, flats = {}, []
        for match in np.flatnonzero(matches.group == group).tolist():
            mine = [flat for flat in matches.members[match].tolist() if flat in wanted]
            flats += mine
            if mine:
                numbers[match] = op_text(int(matches.op[match]))
        if not numbers:
            continue
        last = [matches.rank_of(late[m][0]) for m in numbers if m in late and late[m][1] > 0]
        last_rank, last_times = Counter(last).most_common(1)[0] if last else (None, 0)
        rows.append({
            "group": graph.groups.name[group], "backend": graph.groups.backend[group], "size": len(members),
            "operations": len(numbers), "mostly": Counter(numbers.values()).most_common(1)[0][0],
            "bytes": sum(int(graph.values_of(matches.rank_of(f)).bytes[matches.node_of(f)]) for f in flats),
            "comm_ns": int((end - held)[flats].sum()) // len(members),
            "wait_ns": int((held - start)[flats].sum()) // len(members),
            "last_rank": last_rank, "last_times": last_times, "members": ranks_text(members),
        })  # fmt: skip
    return rows


def slow_span(graph):
    """(rank, call sites after and before which it is slow, ns, times), or None: compute on the critical path beside the lower
    median of the ranks with the same program."""
    own, row, found = graph.durations.own, graph.durations.row, {}
    for number in range(len(graph.programs)):
        peers = np.flatnonzero(graph.ranks.program == number)
        for rank, node in graph.timeline.critical.tolist():
            program = graph.program_of(rank)
            if graph.ranks.program[rank] != number or program.kind[node] != Kind.COMPUTE:
                continue
            usual = sorted(int(own[row[peer]][node]) for peer in peers)[(len(peers) - 1) // 2]
            excess = int(own[row[rank]][node]) - usual
            beside = [[callsite_text(graph, rank, at) for at in places if program.lane[at] == program.lane[node]]
                      for places in (range(node - 1, -1, -1), range(node + 1, len(program)))]  # fmt: skip
            key = rank, *(next(filter(None, sites), "") for sites in beside)
            if excess > 0:
                total, times = found.get(key, (0, 0))
                found[key] = total + excess, times + 1
    return max(((*key, *value) for key, value in found.items()), key=lambda span: span[3], default=None)
