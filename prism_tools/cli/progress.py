"""What a tool says while it works: a moving line on a terminal, and warnings."""

import shutil
import sys
import time
from typing import TextIO


class Progress:
    """What a tool is doing, on ``stream`` (stderr), and only if that is a terminal."""

    def __init__(self, tool: str, stream: TextIO | None = None) -> None:
        self.tool = tool
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._shown = False
        self._next = 0.0

    def say(self, text: str) -> None:
        """One lasting line."""
        if self.live:
            self.clear()
            print(f"{self.tool}: {text}", file=self.stream, flush=True)

    def update(self, text: str) -> None:
        """Rewrite the one moving line; at most ten times a second."""
        if self.live and time.monotonic() >= self._next:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{('  ' + text)[:width]}", end="", file=self.stream, flush=True)
            self._shown, self._next = True, time.monotonic() + 0.1

    def clear(self) -> None:
        """Take the moving line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
            self._shown = False

    def warn(self, text: str) -> None:
        """One line on stderr, terminal or not: the result stands, but not quite as asked."""
        self.clear()
        print(f"{self.tool}: warning: {text}", file=self.stream, flush=True)
