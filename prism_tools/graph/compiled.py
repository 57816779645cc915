"""Kernels: functions over flat arrays that run as plain Python on little work and are compiled on much. Owns numba."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
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


def _compile(function: Callable) -> Callable:
    import numba

    return numba.njit(cache=_keeps(numba.config), nogil=True)(function)


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
