"""What gloo refuses at the call, with its own texts: shapes, types, lists and roots that do not fit, for groups that are played.

Torch's Python has checked what it can before; functions raise RuntimeError where they do not say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

import torch

_CPP = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}


def _sizes(shape: Iterable[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _cpp(dtype: torch.dtype) -> str:
    return _CPP.get(dtype, str(dtype))


def _options(tensor: torch.Tensor) -> str:
    return (
        f"TensorOptions(dtype={_cpp(tensor.dtype)}, device=cpu, layout=Strided, requires_grad=false (default), "
        "pinned_memory=false (default), memory_format=(nullopt))"
    )


def check_alike(name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    """Type and shape of all ``tensors``."""
    for i, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            what, expected, got = "type", _options(like), _options(tensor)
        elif tensor.shape != like.shape:
            what, expected, got = "size", _sizes(like.shape), _sizes(tensor.shape)
        else:
            continue
        raise RuntimeError(
            f"ProcessGroupGloo::{name}: invalid tensor {what} at index {i} (expected {expected}, got {got})"
        )


def check_root(name: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise RuntimeError(f"ProcessGroupGloo::{name}: invalid root rank: {root}")


def check_gathered(
    name: str, row: Sequence[torch.Tensor], mine: torch.Tensor, size: int, i: int = 0, uneven: bool = False
) -> None:
    """all_gather's ``row``: one output for each member. ``uneven``: members may have parts of other sizes."""
    if len(row) != size:
        raise RuntimeError(
            f"ProcessGroupGloo::{name}: invalid output tensor list at index {i} (expected length {size}, got {len(row)})"
        )
    if not uneven:
        check_alike(name, row, mine)


def check_coalesced(outs: Sequence[Sequence[torch.Tensor]], ins: Sequence[torch.Tensor]) -> None:
    """allgather_coalesced: outs[member][i] is of the size of ins[i]."""
    for row in outs:
        for i, (out, mine) in enumerate(zip(row, ins, strict=False)):
            if out.shape != mine.shape:
                raise RuntimeError(
                    f"ProcessGroupGloo::allgather_coalesced: invalid size of output tensor at index {i} "
                    f"(expected length {_sizes(mine.shape)}, got {_sizes(out.shape)})"
                )


def check_rooted(name: str, word: str, tensors: Sequence[torch.Tensor], mine: torch.Tensor, size: int) -> None:
    """The root's list of gather ("output") or scatter ("input")."""
    if len(tensors) != size:
        raise RuntimeError(
            f"ProcessGroupGloo::{name}: Incorrect {word} list size {len(tensors)}. {word.capitalize()} list size should "
            f"be {size}, same as size of the process group."
        )
    check_alike(name, tensors, mine)


def check_exchanged(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], size: int, uneven: bool = False) -> None:
    """all_to_all's lists."""
    for word, tensors in (("input", ins), ("output", outs)):
        if len(tensors) != size:
            raise RuntimeError(
                f"ProcessGroupGloo::alltoall: {word} tensor list size {len(tensors)} does not match world size {size}"
            )
    if not uneven:
        check_alike("alltoall", ins, ins[0])
        check_alike("alltoall", outs, ins[0])


def counts(splits: Iterable[SupportsIndex]) -> list[int]:
    """all_to_all_single's rows for each member, of a list or an array, as numbers. TypeError: of a tensor, as torch's."""
    if isinstance(splits, torch.Tensor):
        raise TypeError("all_to_all_single(): incompatible function arguments: splits are no tensor; use its tolist()")
    return [index(rows) for rows in splits]


def check_splits(splits: Sequence[int], tensor: torch.Tensor, size: int) -> None:
    """all_to_all_single's rows for each member."""
    if splits and len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if splits and sum(splits) != tensor.shape[0]:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def check_scattered(out: torch.Tensor, parts: Sequence[torch.Tensor], size: int, only: int = -1) -> None:
    """reduce_scatter's list. ``only``: the member whose part alone is of the output's shape, or -1: all are."""
    if len(parts) != size:
        raise RuntimeError("invalid input tensor list size, must be world size")
    for part in parts if only < 0 else [parts[only]]:
        _check_equal("outputs[0].sizes().vec() == inputs[0][i].sizes().vec()", out.shape, part.shape)


def check_scattered_single(out: torch.Tensor, whole: torch.Tensor, size: int) -> None:
    """reduce_scatter_tensor: the input is the output ``size`` times, along its first dimension."""
    types = [_cpp(out.dtype)], [_cpp(whole.dtype)]
    _check_equal("outputTensors[i].dtype() == inputTensors[i].dtype()", *types)
    _check_equal("outputShape[0] * worldSize == inputShape[0]", [size * n for n in out.shape[:1]], whole.shape[:1])
    for ours, theirs in zip(out.shape[1:], whole.shape[1:], strict=False):
        _check_equal("outputShape[i] == inputShape[i]", [ours], [theirs])


def check_part(part: torch.Tensor, whole: torch.Tensor, size: int) -> None:
    """NCCL's all_gather and reduce_scatter of one tensor: any shapes. TypeError: its part is of another type; ValueError: it
    is not ``size`` times its part."""
    if part.dtype != whole.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if whole.numel() != part.numel() * size:
        raise ValueError(f"a tensor of {whole.numel()} elements is not world_size times one of {part.numel()}")


def _check_equal(condition: str, ours: Sequence[object], theirs: Sequence[object]) -> None:
    if list(ours) != list(theirs):
        left, right = (" ".join(map(str, side)) for side in (ours, theirs))
        raise RuntimeError(f"Check failed: {condition} ({left} vs. {right}). ")


def check_contiguous(tensors: Sequence[torch.Tensor]) -> None:
    """What is sent or received."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("input tensor has to be contiguous")
