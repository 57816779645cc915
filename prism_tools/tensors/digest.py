"""What is kept of contents that are not kept: how many numbers there were, and what they were like."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from prism_tools.graph.schema import DTYPES
from prism_tools.tensors.executor import unpack


class Digest(NamedTuple):
    """A summary. ``minimum``, ``maximum`` and ``mean`` (float64) are of what is no NaN, and NaN where there is nothing;
    the real and imaginary parts of a complex number are two."""

    dtype: int  # index into the format's types; -1: none
    tensors: int
    elements: int
    nans: int
    minimum: float
    maximum: float
    mean: float


def digest(descs: list[tuple[str, int]], data: Any) -> Digest:
    """Summary of the tensors (dtype name, elements) in ``data``."""
    least, most, total, nans, known = float("inf"), float("-inf"), 0.0, 0, 0
    for tensor in unpack(descs, data):
        flat = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
        wide = flat.double()
        missing = wide.isnan()
        bad = int(missing.sum())
        wide = wide[~missing] if bad else wide
        nans += bad
        if len(wide):
            known += len(wide)
            least, most = min(least, float(wide.min())), max(most, float(wide.max()))
            total += float(wide.sum())
    values = (least, most, total / known) if known else (float("nan"),) * 3
    names = {name for name, _ in descs}
    dtype = DTYPES.index(next(iter(names))) if len(names) == 1 and names <= set(DTYPES) else -1
    return Digest(dtype, len(descs), sum(count for _, count in descs), nans, *values)
