"""What a rank receives where its peers do not run: one function for each generator of tensors/rules.py.

Lists of tensors are ordered as capture/calls.py says. Everything is written past autograd, as a backend does.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prism_tools.graph.schema import Op, Reduce
from prism_tools.tensors.rules import Generator, Occasion

Tensors = list[torch.Tensor]


@dataclass
class Received:
    """An operation of group rank ``me`` among ``ranks`` (global), which receives ``outs``. ``peer``, ``root``: group ranks
    or -1; ``rank``: the global rank. Hooks get it, change ``outs`` in place, and set ``peer`` of a receive from any rank."""

    op: Op
    ins: Tensors
    outs: Tensors
    reduce: Reduce
    factor: float
    root: int
    peer: int
    rank: int
    ranks: tuple[int, ...]
    occasion: Occasion

    @property
    def me(self) -> int:
        return self.ranks.index(self.rank)


def fill(received: Received, generator: Generator) -> None:
    """Write what arrives into ``outs``. A rank's own part of what is gathered or exchanged is its own, whatever the rule.
    ValueError: the generator does not fit the operation; what a hook raises."""
    call = received
    told = call.op in (Op.BROADCAST, Op.RECV, Op.SCATTER) and not call.ins
    if told and len(call.occasion.calls) > 1 and generator.kind not in ("object", "python"):
        raise ValueError(
            "another rank's object is not made up; add a rule with object(LITERAL) or python:MODULE:FUNCTION"
        )
    plain = Received(
        call.op,
        [tensor.detach().data for tensor in call.ins],
        [tensor.detach().data for tensor in call.outs],  # with a version of its own, for autograd
        call.reduce,
        call.factor,
        call.root,
        call.peer,
        call.rank,
        call.ranks,
        call.occasion,
    )
    own = _own_parts(plain)
    _FILL[generator.kind](plain, *generator.arguments)
    call.peer = plain.peer
    for out, part in own:
        _spread(out, part)


def _own_parts(call: Received) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Where this rank's own part of what is gathered, exchanged or scattered belongs, and that part: a copy where it lies in
    the results, as in a gather in place."""
    size, me = len(call.ranks), call.me
    if call.op is Op.ALL_TO_ALL:
        pairs = [(call.outs[me], call.ins[me])]
    elif call.op in (Op.ALL_GATHER, Op.GATHER):
        pairs = [(call.outs[k * size + me], mine) for k, mine in enumerate(call.ins)]
    elif call.op is Op.SCATTER and call.ins:
        pairs = [(call.outs[0], call.ins[me])]
    else:
        pairs = []
    return [(out, part.clone() if _in_one_memory(out, part) else part) for out, part in pairs]


def _in_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def hold_the_same(call: Received) -> None:
    """``self``: the peers hold what this rank holds; what it does not hold (a receive, its part of a scatter) is zeros."""
    size, ins, outs = len(call.ranks), call.ins, call.outs
    if call.op in (Op.ALL_REDUCE, Op.REDUCE):
        for out, mine in zip(outs, ins, strict=True):
            out.copy_(added_up(mine, call.reduce, call.factor, size))
    elif call.op is Op.BROADCAST:
        for out in outs:  # which may be memory that nobody has written yet
            if out.is_floating_point() and out.dtype.itemsize == 1:  # torch cannot do that to 8-bit floats
                out.copy_(out.float().nan_to_num_(posinf=0, neginf=0))
            elif out.is_floating_point() or out.is_complex():
                out.nan_to_num_()
    elif call.op in (Op.ALL_GATHER, Op.GATHER):
        for k, out in enumerate(outs):
            _spread(out, ins[k // size])
    elif call.op is Op.REDUCE_SCATTER:
        for k, out in enumerate(outs):
            out.copy_(added_up(ins[k * size + call.me], call.reduce, call.factor, size).view(out.shape))
    elif call.op is Op.ALL_TO_ALL:
        rows = ins[call.me].flatten()
        for out in outs:
            _spread(out, rows if rows.numel() else torch.cat([part.flatten() for part in ins]))
    else:
        zeros(call)


def added_up(mine: torch.Tensor, kind: Reduce, factor: float, size: int) -> torch.Tensor:
    """The reduction of ``size`` members that all contribute ``mine``."""
    if mine.is_floating_point() and mine.dtype.itemsize == 1:
        mine = mine.float()  # torch cannot multiply 8-bit floats
    if kind is Reduce.PREMUL_SUM:
        return mine * factor * size
    if kind is Reduce.SUM:
        return mine if mine.dtype == torch.bool else mine * size
    if kind is Reduce.PRODUCT:
        return mine if mine.dtype == torch.bool else mine**size
    if kind is Reduce.BXOR and size % 2 == 0:
        return torch.zeros_like(mine)
    return mine  # AVG, MIN, MAX, BAND, BOR, and BXOR of an odd number


def _spread(out: torch.Tensor, values: torch.Tensor) -> None:
    """``values`` over and over until ``out`` is full; zeros if there are none."""
    flat, wanted = values.flatten(), out.numel()
    if not flat.numel():
        out.zero_()
        return
    if flat.numel() < wanted:
        flat = flat.repeat(-(-wanted // flat.numel()))
    out.copy_(flat[:wanted].view(out.shape))


def _put(out: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values``, of the shape of ``out``. ValueError: they are no numbers of its type, such as 300 for a byte."""
    _check_fit(values, out.dtype)
    out.copy_(values)


def _check_fit(values: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype.is_floating_point and not values.is_complex() or dtype.is_complex:
        return
    wrong = values if values.is_complex() else values[values.to(dtype).to(values.dtype) != values]
    if wrong.numel():
        raise ValueError(f"{wrong.flatten()[0].item()} is no {str(dtype).removeprefix('torch.')}")


def zeros(call: Received) -> None:
    """``zeros``."""
    for out in call.outs:
        out.zero_()


def no_rows(call: Received) -> None:
    """``splits-zero``: peers announce that they will send nothing."""
    if call.outs[0].is_floating_point():
        raise ValueError(f"splits-zero answers counts, not {call.occasion.dtype}; use zeros")
    zeros(call)


def constant(call: Received, value: float) -> None:
    """``constant(V)``."""
    for out in call.outs:
        _put(out, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None).expand(out.shape))


def whole_numbers(call: Received, low: int, high: int) -> None:
    """``randint(LOW, HIGH)``: the same numbers on all members and in every run; the program's generators are not used."""
    name = repr((call.occasion.calls[0], call.ranks, call.occasion.groups, call.occasion.ordinal, call.root))
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    own = torch.Generator().manual_seed(seed)
    for out in call.outs:
        _check_fit(torch.tensor([low, high - 1]), out.dtype)
        out.copy_(torch.randint(low, high, out.shape, generator=own))


def pickled(call: Received, value: Any) -> None:
    """``object(LITERAL)``: torch sends how long pickled objects are (int64), then their bytes (uint8)."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    if call.occasion.dtype not in ("int64", "uint8") or len(call.occasion.calls) < 2:
        raise ValueError("object answers torch's object functions (broadcast_object_list, …) only")
    for out in call.outs:
        if call.occasion.dtype == "int64":
            out.fill_(len(data))
            continue
        copies = out.numel() // len(data)
        out.zero_()
        if copies:  # of a broadcast's list; what is gathered is as long as its longest
            many = copies if call.op is Op.BROADCAST else 1
            out.view(-1)[: many * len(data)].copy_(torch.from_numpy(np.tile(data, many)))


def from_file(call: Received, path: str) -> None:
    """``from FILE``: the array's elements, in order, over the results; as many as are needed, from the first one on."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        values = torch.from_numpy(np.array(array).reshape(-1))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    wanted = sum(out.numel() for out in call.outs)
    if values.numel() < wanted:
        raise ValueError(f"{path}: has {values.numel():,} elements where {wanted:,} are received")
    begin = 0
    for out in call.outs:
        _put(out, values[begin : begin + out.numel()].view(out.shape))
        begin += out.numel()


def hook(call: Received, module: str, function: str, folder: str) -> None:
    """``python:MODULE:FUNCTION``: the function changes ``outs``, which hold what ``self`` would give; within torch's object
    functions it returns the object instead. Modules are looked for where the program looks, then beside the rules."""
    if folder not in sys.path:
        sys.path.append(folder)
    found = getattr(importlib.import_module(module), function, None)
    if found is None:
        raise ValueError(f"module {module} has no {function}")
    if len(call.occasion.calls) > 1:
        pickled(call, found(call))
    else:
        hold_the_same(call)
        found(call)


_FILL: dict[str, Callable[..., None]] = {
    "self": hold_the_same,
    "zeros": zeros,
    "splits-zero": no_rows,
    "constant": constant,
    "randint": whole_numbers,
    "object": pickled,
    "from": from_file,
    "python": hook,
}
