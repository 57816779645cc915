"""Call sites: the line of the user's program that an operation comes from, not of torch, a library or ours."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType

import torch

_NEVER = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_STDLIB = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_COMPILED = f"{os.sep}torchinductor_"  # what torch.compile writes and runs
UNKNOWN_SITE = "?"
NEVER, LIBRARY, PROGRAM, BOTTOM = range(4)
_RUNNER = (os.path.join(os.path.dirname(__file__), "ranks.py"), "run_program")  # below it lies the tool's own stack


def kind_of_file(path: str) -> int:
    """Whose code ``path`` is: PROGRAM; LIBRARY (installed: named where no frame of the program is on the stack, such as
    for ``-m package.train``); NEVER: torch, prism, Python itself and what is generated."""
    if path.startswith((*_NEVER, "<")) or path.endswith("typing_extensions.py") or _COMPILED in path:
        return NEVER
    if any(part in path for part in _INSTALLED):
        return LIBRARY
    return NEVER if path.startswith(_STDLIB) else PROGRAM


class CallSites:
    """Interned call sites of one rank: ``texts[index]`` is "file.py:41 function"."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[tuple[CodeType | None, int], int] = {}
        self._kinds: dict[CodeType, int] = {}
        self._cwd = os.getcwd() + os.sep

    def here(self) -> int:
        """Index of the innermost frame of the user's program on this thread's stack; on a thread without one (autograd's
        run hooks of DDP and FSDP2), of the main thread's stack: it waits in backward meanwhile."""
        found = self._innermost(sys._getframe(1))
        if found is None and threading.get_ident() != threading.main_thread().ident:
            found = self._innermost(sys._current_frames().get(threading.main_thread().ident or 0))
        return self._intern(None, 0) if found is None else self._intern(found.f_code, found.f_lineno)

    def _innermost(self, frame: FrameType | None) -> FrameType | None:
        library: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code)
            if kind is None:
                kind = BOTTOM if (code.co_filename, code.co_name) == _RUNNER else kind_of_file(code.co_filename)
                self._kinds[code] = kind
            if kind == PROGRAM:
                return frame
            if kind == BOTTOM:
                break
            if kind == LIBRARY and library is None:
                library = frame
            frame = frame.f_back
        return library

    def _intern(self, code: CodeType | None, line: int) -> int:
        key = (code, line)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.texts)
            self.texts.append(self._text(code, line))
        return index

    def _text(self, code: CodeType | None, line: int) -> str:
        if code is None:
            return UNKNOWN_SITE
        path = code.co_filename
        name = path[len(self._cwd) :] if path.startswith(self._cwd) else os.path.basename(path)
        return f"{name}:{line} {code.co_name}"
