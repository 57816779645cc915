"""Every c10d operation in one normal form: what a member contributes and where its results go, as flat lists of tensors.

The order of the lists is the executor's (tensors/executor.py). For K members and T tensors:
  all_reduce, reduce, broadcast   ins[T] → outs[T] (reduce: outs on the root only; broadcast: ins on the root, outs elsewhere)
  all_gather                      ins[T] → outs[T * K], tensor-major
  reduce_scatter                  ins[T * K], tensor-major → outs[T]
  all_to_all                      ins[K] → outs[K], by peer
  gather, scatter                 ins[1] → outs[K] on the root; ins[K] on the root → outs[1]
  send, recv                      ins[T]; outs[T]
In front of a real backend nothing may be split, copied or refused: there a tensor that holds several members' parts stays whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from prism_tools.graph.schema import Op, Reduce

if TYPE_CHECKING:
    from prism_tools.capture.groups import TracedGroup

ANY_SOURCE = -1
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclass(slots=True)
class Call:
    """One operation of one member. ``peer`` and ``root`` are group ranks; ``factor`` is PREMUL_SUM's."""

    op: Op
    ins: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    reduce: Reduce = Reduce.NONE
    root: int = -1
    peer: int = -1
    tag: int = -1
    factor: float = 1.0
    sync: bool = False  # the caller said that it blocks at once; False where that is not known
    splits: tuple[int, ...] = ()  # all_to_all of whole tensors: bytes to each member, then from each
    whole: bool = False  # reduce_scatter: the parts are of one tensor for each output
    device: str = ""  # type of device where there is no tensor to tell


def reduction(op: Any) -> tuple[Reduce, float]:
    """The schema's reduction of a torch ReduceOp, and PREMUL_SUM's factor (1.0 otherwise)."""
    for name in _NAMES:
        if op == getattr(dist.ReduceOp, name):
            return Reduce[name], 1.0
    return Reduce.PREMUL_SUM, float(op.__getstate__()[1])


def as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def is_sync(options: Any) -> bool:
    return options is not None and not getattr(options, "asyncOp", True)


def reduce_of(options: Any) -> tuple[Reduce, float]:
    """Options object, bare ReduceOp or None (SUM)."""
    if options is None:
        return Reduce.SUM, 1.0
    return reduction(getattr(options, "reduceOp", options))


def device_of(call: Call) -> str:
    """The type of device that the operation's backend serves."""
    tensors = call.ins or call.outs
    return tensors[0].device.type if tensors else call.device or "cpu"


def chunks(group: TracedGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    """A part for each member, as equal flat views; the whole tensor where the backend is real."""
    if not group.played:
        return [tensor]
    flat, parts = tensor.detach().contiguous().view(-1), group.size()
    return list(flat.split(flat.numel() // parts)) if flat.numel() else [flat] * parts


def all_reduce(group: TracedGroup, tensors: Any, options: Any = None, *_: Any, **__: Any) -> Call:
    ts = as_list(tensors)
    if group.played and ts and ts[0].is_sparse:
        raise RuntimeError("prism: sparse all_reduce is not supported")
    kind, factor = reduce_of(options)
    return Call(Op.ALL_REDUCE, ts, ts, kind, factor=factor, sync=is_sync(options))


def reduce(group: TracedGroup, tensors: Any, options: Any, *_: Any) -> Call:
    ts = as_list(tensors)
    kind, factor = reduce_of(options)
    root = options.rootRank
    return Call(Op.REDUCE, ts, ts if group.rank() == root else [], kind, root, factor=factor, sync=is_sync(options))


def broadcast(group: TracedGroup, tensors: Any, options: Any = None, *_: Any, **__: Any) -> Call:
    ts = as_list(tensors)
    root = getattr(options, "rootRank", options if isinstance(options, int) else 0)
    mine = group.rank() == root
    return Call(Op.BROADCAST, ts if mine else [], [] if mine else ts, root=root, sync=is_sync(options))


def allgather(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    if isinstance(ins, torch.Tensor):
        outs, ins = [outs], [ins]
    return Call(Op.ALL_GATHER, list(ins), [t for row in outs for t in row], sync=is_sync(options))


def all_gather_single(group: TracedGroup, out: torch.Tensor, inp: torch.Tensor, options: Any = None, *_: Any) -> Call:
    return Call(Op.ALL_GATHER, [inp], chunks(group, out), sync=is_sync(options))


def all_gather_single_coalesced(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    flat = [piece for out in outs for piece in chunks(group, out)]
    return Call(Op.ALL_GATHER, list(ins), flat, sync=is_sync(options))


def allgather_coalesced(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    flat = [outs[r][i] for i in range(len(ins)) for r in range(group.size())]
    return Call(Op.ALL_GATHER, list(ins), flat, sync=is_sync(options))


def reduce_scatter(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any, **__: Any) -> Call:
    if isinstance(outs, torch.Tensor):
        outs, ins = [outs], [ins]
    kind, factor = reduce_of(options)
    flat = [t for row in ins for t in row]
    return Call(Op.REDUCE_SCATTER, flat, list(outs), kind, factor=factor, sync=is_sync(options))


def reduce_scatter_single(
    group: TracedGroup, out: torch.Tensor, inp: torch.Tensor, options: Any = None, *_: Any
) -> Call:
    return reduce_scatter_single_coalesced(group, [out], [inp], options)


def reduce_scatter_single_coalesced(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    kind, factor = reduce_of(options)
    flat = [piece for inp in ins for piece in chunks(group, inp)]
    return Call(Op.REDUCE_SCATTER, flat, list(outs), kind, factor=factor, sync=is_sync(options), whole=True)


def _row_bytes(tensor: torch.Tensor, sizes: list[int]) -> list[int]:
    rows = tensor.shape[0] if tensor.ndim else 0
    row = tensor.numel() * tensor.element_size() // rows if rows else 0
    return [int(size) * row for size in sizes]


def all_to_all_single(
    group: TracedGroup, out: torch.Tensor, inp: torch.Tensor, out_splits: Any, in_splits: Any, options: Any = None
) -> Call:
    size = group.size()
    in_sizes = list(in_splits) or [inp.shape[0] // size if inp.ndim else 0] * size
    out_sizes = list(out_splits) or [out.shape[0] // size if out.ndim else 0] * size
    if not group.played:
        splits = (*_row_bytes(inp, in_sizes), *_row_bytes(out, out_sizes))
        return Call(Op.ALL_TO_ALL, [inp], [out], sync=is_sync(options), splits=splits)
    ins = list(inp.detach().contiguous().split(in_sizes))
    return Call(Op.ALL_TO_ALL, ins, list(out.detach().split(out_sizes)), sync=is_sync(options))


def alltoall(group: TracedGroup, outs: Any, ins: Any, options: Any = None) -> Call:
    return Call(Op.ALL_TO_ALL, list(ins), list(outs), sync=is_sync(options))


def gather(group: TracedGroup, outs: Any, ins: Any, options: Any, *_: Any) -> Call:
    root = options.rootRank
    return Call(
        Op.GATHER, as_list(ins), list(outs[0]) if group.rank() == root else [], root=root, sync=is_sync(options)
    )


def scatter(group: TracedGroup, outs: Any, ins: Any, options: Any, *_: Any) -> Call:
    root = options.rootRank
    mine = list(ins[0]) if group.rank() == root else []
    return Call(Op.SCATTER, mine, as_list(outs), root=root, sync=is_sync(options))


def barrier(group: TracedGroup, options: Any = None, *_: Any, **__: Any) -> Call:
    device = getattr(options, "device", None)
    return Call(Op.BARRIER, sync=is_sync(options), device=device.type if device else group.preferred_device())


def send(group: TracedGroup, tensors: Any, dst: int, tag: int = 0) -> Call:
    return Call(Op.SEND, as_list(tensors), peer=dst, tag=tag)


def recv(group: TracedGroup, tensors: Any, src: int, tag: int = 0) -> Call:
    return Call(Op.RECV, outs=as_list(tensors), peer=src, tag=tag)


def recv_anysource(group: TracedGroup, tensors: Any, tag: int = 0) -> Call:
    return Call(Op.RECV, outs=as_list(tensors), peer=ANY_SOURCE, tag=tag)


# c10d method → normal form; torch 2.11's and 2.13's names.
METHODS: dict[str, Callable[..., Call]] = {
    "allreduce": all_reduce,
    "allreduce_coalesced": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "allgather": allgather,
    "_allgather_base": all_gather_single,
    "all_gather_single": all_gather_single,
    "all_gather_single_coalesced": all_gather_single_coalesced,
    "allgather_into_tensor_coalesced": all_gather_single_coalesced,
    "allgather_coalesced": allgather_coalesced,
    "reduce_scatter": reduce_scatter,
    "_reduce_scatter_base": reduce_scatter_single,
    "reduce_scatter_single": reduce_scatter_single,
    "reduce_scatter_single_coalesced": reduce_scatter_single_coalesced,
    "reduce_scatter_tensor_coalesced": reduce_scatter_single_coalesced,
    "all_to_all_single": all_to_all_single,
    "alltoall_base": all_to_all_single,
    "alltoall": alltoall,
    "gather": gather,
    "scatter": scatter,
    "barrier": barrier,
    "send": send,
    "recv": recv,
    "recv_anysource": recv_anysource,
}
