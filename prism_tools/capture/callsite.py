"""Call sites: the line of the user's program that an operation comes from, not torch's or ours."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
_STDLIB = os.path.dirname(os.__file__) + os.sep
UNKNOWN_SITE = "?"


def is_user_file(path: str) -> bool:
    """Whether ``path`` belongs to the program (or a framework that it uses), not to torch, prism or Python itself."""
    if path.startswith((*_LIBRARIES, "<")) or path.endswith("typing_extensions.py"):
        return False
    return not path.startswith(_STDLIB) or "site-packages" in path


class CallSites:
    """Interned call sites of one rank: ``texts[index]`` is "file.py:41 function"."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[tuple[CodeType | None, int], int] = {}
        self._is_user: dict[CodeType, bool] = {}
        self._cwd = os.getcwd() + os.sep

    def here(self) -> int:
        """Index of the innermost frame of the user's program on this thread's stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            user = self._is_user.get(code)
            if user is None:
                user = self._is_user[code] = is_user_file(code.co_filename)
            if user:
                return self._intern(code, frame.f_lineno)
            frame = frame.f_back
        return self._intern(None, 0)

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
