"""The order in which gloo adds: each chunk of a vector goes once round the ring of members, so its sum begins at another one.

As gloo's allreduce.cc and reduce.cc do it: member c ends up with chunk c, which begins at member c - 1 and goes down by one at
each step; each member combines its own value with what came, in the tensors' own type (16-bit floats are rounded at each step).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prism_tools.graph.schema import Reduce

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # gloo's, whose sums depend on the order
SEGMENT = 1 << 20  # bytes: the largest piece that gloo sends at once

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Own value first, then what came. Gloo's minimum and maximum keep the own one where nothing is smaller or larger (NaN, zeros).
COMBINE: dict[Reduce, Combine] = {
    Reduce.SUM: torch.add,
    Reduce.AVG: torch.add,
    Reduce.PREMUL_SUM: torch.add,
    Reduce.PRODUCT: torch.mul,
    Reduce.MIN: lambda own, came: torch.where(came < own, came, own),
    Reduce.MAX: lambda own, came: torch.where(own < came, came, own),
}


def all_reduce_chunk(count: int, itemsize: int, members: int) -> int:
    """Elements of a chunk of gloo's all_reduce of ``count`` elements of ``itemsize`` bytes; the last chunks may be shorter."""
    size = count * itemsize
    segments = _up(max(_parts(size, _largest(itemsize)), 2 * members), members)
    return segments // members * _up(_parts(size, segments), itemsize) // itemsize


def reduce_chunk(count: int, itemsize: int, members: int) -> int:
    """As all_reduce_chunk, of gloo's reduce, which rounds the other way round."""
    size = count * itemsize
    segment = max(_up(min(_parts(size, 2 * members), _largest(itemsize)), itemsize), itemsize)
    return _up(max(_parts(size, segment), 2 * members), members) // members * segment // itemsize


def fold(parts: list[torch.Tensor], kind: Reduce, chunk: int) -> torch.Tensor:
    """The members' flat tensors, by group rank, combined chunk by chunk round the ring; a new tensor.

    Chunk c takes the members in the order c - 1, …, 0, last, …, c. So going down the members twice, first with the chunks
    above each one, then with the others, takes all chunks at once.
    """
    combine = COMBINE[kind]
    total = torch.empty_like(parts[0])
    last = len(parts) - 1
    for member in range(last - 1, -1, -1):
        part, begin, end = parts[member], (member + 1) * chunk, (member + 2) * chunk
        total[begin:end] = part[begin:end]
        total[end:] = combine(part[end:], total[end:])
    total[:chunk] = parts[last][:chunk]
    total[chunk:] = combine(parts[last][chunk:], total[chunk:])
    for member in range(last - 1, -1, -1):
        end = (member + 1) * chunk
        total[:end] = combine(parts[member][:end], total[:end])
    return total


def _largest(itemsize: int) -> int:
    return SEGMENT // itemsize * itemsize


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def _up(value: int, multiple: int) -> int:
    return _parts(value, multiple) * multiple
