"""Objects whose reference counts nobody writes: their pages stay shared by forked ranks (PEP 683, Python 3.12 and later)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any


def is_possible() -> bool:
    """Whether this interpreter knows immortal objects, and keeps counts where they are expected."""
    if (
        sys.version_info < (3, 12)
        or sys.implementation.name != "cpython"
        or sysconfig.get_config_var("Py_GIL_DISABLED")
    ):
        return False
    probe = object()
    count, others = _count_of(probe), [probe] * 7
    return sys.byteorder == "little" and count.value == sys.getrefcount(probe) - 1 == len(others) + 1


def immortalize() -> int:
    """Let every object that is there now live as long as the process; returns how many they are: 0 where it is not possible."""
    if not is_possible():
        return 0
    for_ever = _count_of(None).value
    seen: set[int] = set()
    ahead: list[Any] = gc.get_objects()
    own = {id(seen), id(ahead)}
    while ahead:
        thing = ahead.pop()
        address = id(thing)
        if address in seen or address in own or type(thing) is FrameType:  # a frame's end must stay its end
            continue
        seen.add(address)
        _count_of(thing).value = for_ever
        _complete(thing)
        if type(thing) is CodeType:  # not the collector's business, so it does not say what it refers to
            ahead += (thing.co_consts, thing.co_names, thing.co_filename, thing.co_name, thing.co_qualname)
            ahead += (thing.co_linetable, thing.co_exceptiontable)
        else:
            ahead += gc.get_referents(thing)
    return len(seen)


def _complete(thing: Any) -> None:
    """Let a thing have what the interpreter would write into it later: a text its hash, a type the number of its version."""
    if type(thing) in (str, bytes):
        hash(thing)
    elif issubclass(type(thing), type):
        with contextlib.suppress(AttributeError):
            type.__getattribute__(thing, "no such attribute")


def _count_of(thing: Any) -> ctypes.c_uint32:
    """The lower half of an object's reference count, which says whether it is immortal."""
    return ctypes.c_uint32.from_address(id(thing))
