"""Kernels: functions over flat arrays that run as plain Python on little work and are compiled on much. Owns numba."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

SMALL = 20_000  # nodes; below, importing numba and reading compiled code takes longer than plain Python does


class Kernel:
    """A decorator. ``kernel(work, ...)`` calls the function; ``work``, about its number of steps, decides how.

    Compiled code is kept in $NUMBA_CACHE_DIR, else in the user's cache folder, so that it is made once.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self._compiled: Callable | None = None

    def __call__(self, work: int, *arguments: Any) -> Any:
        if work < SMALL:
            return self.function(*arguments)
        if self._compiled is None:
            self._compiled = _compile(self.function)
        return self._compiled(*arguments)


def prefetch(array: Any, index: int) -> None:
    """Ask for the memory of ``array[index]``, soon to be used; it need not exist. Does nothing in plain Python.

    With thousands of ranks there are more streams than processors notice by themselves.
    """


_PARTS: list[Callable] = []


def part(function: Callable) -> Callable:
    """A decorator: kernels of its module may call the function."""
    _PARTS.append(function)
    return function


def _compile(function: Callable) -> Callable:
    import numba

    _compile_prefetch()
    inner = numba.njit(inline="always")  # calls with many arrays take longer than what most parts do
    known = function.__globals__
    known = known | {name: inner(value) for name, value in known.items() if callable(value) and value in _PARTS}
    function = FunctionType(function.__code__, known, function.__name__)
    return numba.njit(cache=_keeps(numba.config), nogil=True)(function)


@cache
def _compile_prefetch() -> None:
    """Tell numba what ``prefetch`` is in compiled code: an instruction."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic, overload

    @intrinsic
    def instruction(_: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [cgutils.int32_t] * 3)
            called = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
            builder.call(called, [address, *(cgutils.int32_t(k) for k in (0, 3, 1))])  # read, keep, data
            return context.get_dummy_value()

        return types.none(array, types.intp), generate

    @overload(prefetch)
    def compiled(array, index):  # numba compares the signatures, annotations and all
        return lambda array, index: instruction(array, index)


def _keeps(config: Any) -> bool:
    """Whether compiled code can be kept; tells numba where, for its own choice is beside the installed sources."""
    if not config.CACHE_DIR:
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism-tools" / "numba"
            cache.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            return False
        config.CACHE_DIR = str(cache)
    return os.access(config.CACHE_DIR, os.W_OK)
