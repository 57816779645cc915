"""Who waits for whom in a match: sets of arrivals that must gather, and the members that each set lets go."""

from __future__ import annotations

from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import Match

Release = tuple[list[int], list[int]]  # arrivals, leavers (flat nodes): the leavers go once all the arrivals have come

_WITH_ROOT = tuple(int(kind) for kind in (Match.ROOT_FIRST, Match.ROOT_LAST, Match.ROOTED, Match.TREE))


def releases(graph: Graph, matches: Matches, match: int) -> list[Release]:
    """The releases of ``match`` by its kind (design §2); every member leaves in exactly one."""
    members: list[int] = matches.members[match].tolist()
    kind = int(matches.kind[match])
    if kind == Match.EAGER and len(members) == 2:
        return [(members[:1], members[:1]), (members, members[1:])]
    root = root_of(graph, matches, match)
    if not root:
        return [(members, members)]
    others = [member for member in members if member not in root]
    if kind == Match.ROOT_FIRST:
        return [(root, root)] + [(root + [other], [other]) for other in others]
    if kind == Match.ROOT_LAST:
        return [([other], [other]) for other in others] + [(members, root)]
    if kind == Match.ROOTED:
        return [(root + [other], [other]) for other in others] + [(members, root)]
    return _tree(members, members.index(root[0]))


def _tree(members: list[int], root: int) -> list[Release]:
    """Gloo's broadcast: a binomial tree of rendezvous; a member needs its ancestors, itself and its children."""
    size = len(members)
    turned = [members[(root + place) % size] for place in range(size)]
    found = []
    for place in range(size):
        needed = [place]
        while needed[-1]:
            needed.append(needed[-1] & ~(1 << (needed[-1].bit_length() - 1)))
        step = 1 << place.bit_length()
        while place + step < size:
            needed.append(place + step)
            step <<= 1
        found.append(([turned[k] for k in needed], [turned[place]]))
    return found


def root_of(graph: Graph, matches: Matches, match: int) -> list[int]:
    """The root's flat node in a ``match`` whose kind has one; empty if it has none."""
    if int(matches.kind[match]) not in _WITH_ROOT:
        return []
    members = matches.members[match].tolist()
    place = int(graph.program_of(matches.rank_of(members[0])).root[matches.node_of(members[0])])
    rank = int(graph.groups.members[int(matches.group[match])][place])
    return [member for member in members if matches.rank_of(member) == rank]
