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

from prism_tools.capture import misfits
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
    given: list[torch.Tensor] = field(default_factory=list)  # the caller's tensors, if ins and outs stand for them


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


def by_size(group: TracedGroup) -> bool:
    """Whether the server plays NCCL, whose shapes may differ, and whose lists may hold tensors of several sizes."""
    return group.played and group.backend_name == "nccl"


def chunks(group: TracedGroup, tensor: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
    """A part for each member, as equal views along the first dimension, which NCCL does not ask for: there ``part``, which is
    given beside the tensor, only has to be as large; the whole tensor where the backend is real."""
    if not group.played:
        return [tensor]
    if by_size(group):
        misfits.check_part(part, tensor, group.size())
        if not part.numel():
            return [part.detach()] * group.size()
        if tensor.is_contiguous():
            return list(tensor.detach().view(-1).split(part.numel()))
    return list(tensor.detach().chunk(group.size()))


def all_reduce(group: TracedGroup, tensors: Any, options: Any = None, *_: Any, **__: Any) -> Call:
    ts = as_list(tensors)
    kind, factor = reduce_of(options)
    if group.played and ts and ts[0].is_sparse:
        return sparse_all_reduce(ts, kind, is_sync(options))
    flat = memory(group, ts)
    return Call(Op.ALL_REDUCE, flat, flat, kind, factor=factor, sync=is_sync(options), given=ts)


def sparse_all_reduce(ts: list[torch.Tensor], kind: Reduce, sync: bool) -> Call:
    """A sum of dense tensors, and with each a sum of where its places are."""
    if kind is not Reduce.SUM:
        name, only = "ProcessGroupGloo::allreduce", "allreduce of sparse tensors only works with ReduceOp.SUM"
        raise RuntimeError(f"{name}: unsupported reduction operation ({only})")
    dense = []
    for tensor in ts:
        tensor = tensor.detach().coalesce()
        ones = torch.ones(tensor.indices().shape[1], dtype=torch.int32)
        places = torch.sparse_coo_tensor(tensor.indices(), ones, tensor.shape[: tensor.sparse_dim()])
        dense += [tensor.to_dense(), places.to_dense()]
    return Call(Op.ALL_REDUCE, dense, dense, kind, sync=sync, given=ts)


def memory(group: TracedGroup, ts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What gloo sums and broadcasts: as many elements as there are, from the first one on, whatever the strides say."""
    if not group.played or all(tensor.is_contiguous() for tensor in ts):
        return ts
    return [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in ts]


def densified(call: Call) -> None:
    """The results are in ``outs``: put those of sparse tensors where the caller expects them."""
    for tensor, total, places in zip(call.given, call.outs[::2], call.outs[1::2], strict=True):
        indices = places.nonzero().t()
        with torch.no_grad():
            tensor.copy_(torch.sparse_coo_tensor(indices, total[tuple(indices)], tensor.shape).coalesce())


def reduce(group: TracedGroup, tensors: Any, options: Any, *_: Any) -> Call:
    ts = as_list(tensors)
    kind, factor = reduce_of(options)
    root = options.rootRank
    if group.played:
        misfits.check_root("reduce", root, group.size())
    flat = memory(group, ts)
    outs = flat if group.rank() == root else []
    return Call(Op.REDUCE, flat, outs, kind, root, factor=factor, sync=is_sync(options), given=ts)


def broadcast(group: TracedGroup, tensors: Any, options: Any = None, *_: Any, **__: Any) -> Call:
    ts = as_list(tensors)
    root = getattr(options, "rootRank", options if isinstance(options, int) else 0)
    if group.played:
        misfits.check_root("broadcast", root, group.size())
    mine = group.rank() == root
    flat = memory(group, ts)
    ins, outs = (flat, []) if mine else ([], flat)
    return Call(Op.BROADCAST, ins, outs, root=root, sync=is_sync(options), given=ts)


def allgather(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    if isinstance(ins, torch.Tensor):
        outs, ins = [outs], [ins]
    if group.played:
        for i, (row, mine) in enumerate(zip(outs, ins, strict=True)):
            misfits.check_gathered("allgather", row, mine, group.size(), i, by_size(group))
    return Call(Op.ALL_GATHER, list(ins), [t for row in outs for t in row], sync=is_sync(options))


def all_gather_single(group: TracedGroup, out: torch.Tensor, inp: torch.Tensor, options: Any = None, *_: Any) -> Call:
    return all_gather_single_coalesced(group, [out], [inp], options)


def all_gather_single_coalesced(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    rows = [chunks(group, out, inp) for out, inp in zip(outs, ins, strict=True)]
    if group.played and not by_size(group):
        for i, (row, mine) in enumerate(zip(rows, ins, strict=True)):
            misfits.check_gathered("allgather", row, mine, group.size(), i)
    flat = [piece for row in rows for piece in row]
    return Call(Op.ALL_GATHER, list(ins), flat, sync=is_sync(options))


def allgather_coalesced(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    if group.played:
        misfits.check_coalesced(outs, ins)
    flat = [outs[r][i] for i in range(len(ins)) for r in range(group.size())]
    return Call(Op.ALL_GATHER, list(ins), flat, sync=is_sync(options))


def reduce_scatter(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any, **__: Any) -> Call:
    if isinstance(outs, torch.Tensor):
        outs, ins = [outs], [ins]
    kind, factor = reduce_of(options)
    if group.played:
        for out, row in zip(outs, ins, strict=True):
            misfits.check_scattered(out, row, group.size(), group.rank() if by_size(group) else -1)
    flat = [t for row in ins for t in row]
    return Call(Op.REDUCE_SCATTER, flat, list(outs), kind, factor=factor, sync=is_sync(options))


def reduce_scatter_single(
    group: TracedGroup, out: torch.Tensor, inp: torch.Tensor, options: Any = None, *_: Any
) -> Call:
    return reduce_scatter_single_coalesced(group, [out], [inp], options)


def reduce_scatter_single_coalesced(group: TracedGroup, outs: Any, ins: Any, options: Any = None, *_: Any) -> Call:
    kind, factor = reduce_of(options)
    if group.played and not by_size(group):
        for out, inp in zip(outs, ins, strict=True):
            misfits.check_scattered_single(out, inp, group.size())
    flat = [piece for out, inp in zip(outs, ins, strict=True) for piece in chunks(group, inp, out)]
    return Call(Op.REDUCE_SCATTER, flat, list(outs), kind, factor=factor, sync=is_sync(options), whole=True)


def _row_bytes(tensor: torch.Tensor, sizes: list[int]) -> list[int]:
    rows = tensor.shape[0] if tensor.ndim else 0
    row = tensor.numel() * tensor.element_size() // rows if rows else 0
    return [size * row for size in sizes]


def all_to_all_single(
    group: TracedGroup, out: torch.Tensor, inp: torch.Tensor, out_splits: Any, in_splits: Any, options: Any = None
) -> Call:
    size = group.size()
    in_sizes, out_sizes = misfits.counts(in_splits), misfits.counts(out_splits)
    if group.played:
        if not (inp.is_contiguous() and out.is_contiguous()):
            raise ValueError("Tensors must be contiguous")
        misfits.check_splits(in_sizes, inp, size)
        misfits.check_splits(out_sizes, out, size)
    in_sizes = in_sizes or [inp.shape[0] // size if inp.ndim else 0] * size
    out_sizes = out_sizes or [out.shape[0] // size if out.ndim else 0] * size
    if not group.played:
        splits = (*_row_bytes(inp, in_sizes), *_row_bytes(out, out_sizes))
        return Call(Op.ALL_TO_ALL, [inp], [out], sync=is_sync(options), splits=splits)
    ins = list(inp.detach().contiguous().split(in_sizes))
    return Call(Op.ALL_TO_ALL, ins, list(out.detach().split(out_sizes)), sync=is_sync(options))


def alltoall(group: TracedGroup, outs: Any, ins: Any, options: Any = None) -> Call:
    if group.played:
        misfits.check_exchanged(outs, ins, group.size(), by_size(group))
    return Call(Op.ALL_TO_ALL, list(ins), list(outs), sync=is_sync(options))


def gather(group: TracedGroup, outs: Any, ins: Any, options: Any, *_: Any) -> Call:
    root = options.rootRank
    mine = list(outs[0]) if group.rank() == root and outs else []
    if group.played:
        misfits.check_root("gather", root, group.size())
        if group.rank() == root:
            misfits.check_rooted("gather", "output", mine, as_list(ins)[0], group.size())
    return Call(Op.GATHER, as_list(ins), mine, root=root, sync=is_sync(options))


def scatter(group: TracedGroup, outs: Any, ins: Any, options: Any, *_: Any) -> Call:
    root = options.rootRank
    mine = list(ins[0]) if group.rank() == root and ins else []
    if group.played:
        misfits.check_root("scatter", root, group.size())
        if group.rank() == root:
            misfits.check_rooted("scatter", "input", mine, as_list(outs)[0], group.size())
    return Call(Op.SCATTER, mine, as_list(outs), root=root, sync=is_sync(options))


def barrier(group: TracedGroup, options: Any = None, *_: Any, **__: Any) -> Call:
    device = getattr(options, "device", None)
    return Call(Op.BARRIER, sync=is_sync(options), device=device.type if device else group.preferred_device())


def send(group: TracedGroup, tensors: Any, dst: int, tag: int = 0) -> Call:
    if group.played:
        misfits.check_contiguous(as_list(tensors))
    return Call(Op.SEND, as_list(tensors), peer=dst, tag=tag)


def recv(group: TracedGroup, tensors: Any, src: int, tag: int = 0) -> Call:
    if group.played:
        misfits.check_contiguous(as_list(tensors))
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
