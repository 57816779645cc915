"""What NCCL does with tensors of several sizes, or of other shapes than gloo asks for, done by gloo behind a pretended "nccl"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup as RealGroup
from torch._C._distributed_c10d import Work

from prism_tools.capture.calls import reduce_of
from prism_tools.graph.schema import Reduce

Tensors = list[torch.Tensor]
# Operations on one tensor that holds a part for each member; gloo wants the parts along its first dimension.
WHOLE = ("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single")
WHOLES = (
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip


class _Together(Work):
    """Several operations of gloo's as one; ``finish``: what is left to do when all are done."""

    def __init__(self, works: list[Work], outs: Tensors, finish: Callable[[], object]) -> None:
        super().__init__()

        def done(every: torch.futures.Future) -> Tensors:
            for each in every.value():
                each.value()  # raises what went wrong
            finish()
            return outs

        self._future = torch.futures.collect_all([work.get_future() for work in works]).then(done)
        self._outs = outs

    def wait(self, *_: Any) -> bool:
        self._future.wait()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self._future.value()
        except Exception as problem:
            return problem
        return None

    def result(self) -> Tensors:
        return self._outs

    def get_future(self) -> torch.futures.Future:
        return self._future


def _uneven(tensors: Iterable[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) > 1


def _copy(outs: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for out, value in zip(outs, values, strict=True):
            out.copy_(value.view(out.shape))


def _gather(operation: Callable) -> Callable:
    """As NCCL does: each member broadcasts its part."""

    def method(group: dist.ProcessGroup, outs: list[Tensors], ins: Tensors, options: Any = None) -> Work:
        if len(ins) != 1 or not _uneven(outs[0]):
            return operation(group, outs, ins, *([] if options is None else [options]))
        _copy([outs[0][group.rank()]], ins)
        works = []
        for root, out in enumerate(outs[0]):
            part = dist.BroadcastOptions()
            part.rootRank = root
            works.append(RealGroup.broadcast(group, [out], part))
        return _Together(works, outs[0], lambda: None)

    return method


def _reduce_scatter(operation: Callable) -> Callable:
    """Each part is summed on its own, as gloo does too, and scaled before where NCCL would."""

    def method(group: dist.ProcessGroup, outs: Tensors, ins: list[Tensors], options: Any = None) -> Work:
        kind, factor = reduce_of(options)
        scaled = kind is Reduce.PREMUL_SUM
        if len(outs) != 1 or not (scaled or _uneven(ins[0])):
            return operation(group, outs, ins, *([] if options is None else [options]))
        sums, works = [part * factor if scaled else part.clone() for part in ins[0]], []
        for part in sums:
            its = dist.AllreduceOptions()
            its.reduceOp = dist.ReduceOp.SUM if scaled or options is None else options.reduceOp
            works.append(RealGroup.allreduce(group, [part], its))
        return _Together(works, outs, lambda: _copy(outs, [sums[group.rank()]]))

    return method


def _exchange(operation: Callable) -> Callable:
    """The lists are exchanged as one tensor with splits."""

    def method(group: dist.ProcessGroup, outs: Tensors, ins: Tensors, options: Any = None) -> Work:
        if not _uneven([*outs, *ins]):
            return operation(group, outs, ins, *([] if options is None else [options]))
        sizes = [tensor.numel() for tensor in outs]
        arrived = torch.cat([torch.empty(size, dtype=outs[0].dtype) for size in sizes])
        sent = torch.cat([tensor.reshape(-1) for tensor in ins])
        exchange = getattr(RealGroup, "all_to_all_single", None) or RealGroup.alltoall_base
        work = exchange(group, arrived, sent, sizes, [tensor.numel() for tensor in ins], dist.AllToAllOptions())
        return _Together([work], outs, lambda: _copy(outs, arrived.split(sizes)))

    return method


def _as_vectors(tensors: Tensors) -> Tensors:
    return [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in tensors]


def _flat(operation: Callable) -> Callable:
    def method(group: dist.ProcessGroup, out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        return operation(group, *_as_vectors([out, given]), *args, **kwargs)

    return method


def _flats(operation: Callable) -> Callable:
    def method(group: dist.ProcessGroup, outs: Tensors, ins: Tensors, *args: Any, **kwargs: Any) -> Work:
        return operation(group, _as_vectors(outs), _as_vectors(ins), *args, **kwargs)

    return method


def install() -> None:
    """Stand before the operations of real groups."""
    wrappers = {"allgather": _gather, "reduce_scatter": _reduce_scatter, "alltoall": _exchange}
    for name, wrapper in (wrappers | dict.fromkeys(WHOLE, _flat) | dict.fromkeys(WHOLES, _flats)).items():
        if hasattr(RealGroup, name):
            setattr(RealGroup, name, wrapper(getattr(RealGroup, name)))
