"""What a tool says while it works: a moving line on a terminal, now and then a line in a log, and warnings."""

import shutil
import sys
import time
from typing import TextIO

MOVING, LOGGED = 0.1, 10.0  # seconds from one line to the next


class Progress:
    """What a tool is doing, on ``stream`` (stderr), and only if that is a terminal, or ``log`` is set."""

    def __init__(self, tool: str, stream: TextIO | None = None) -> None:
        self.tool = tool
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.log = False
        self._shown = False
        self._next = 0.0

    def say(self, text: str) -> None:
        """One lasting line."""
        if self.live or self.log:
            self.clear()
            print(f"{self.tool}: {text}", file=self.stream, flush=True)

    def due(self) -> bool:
        """Whether an update would be shown now."""
        return (self.live or self.log) and time.monotonic() >= self._next

    def update(self, text: str) -> None:
        """Rewrite the one moving line, at most ten times a second; in a log, one more line every ten seconds."""
        if not self.due():
            return
        self._next = time.monotonic() + (MOVING if self.live else LOGGED)
        if not self.live:
            self.say(text)
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{('  ' + text)[:width]}", end="", file=self.stream, flush=True)
        self._shown = True

    def clear(self) -> None:
        """Take the moving line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
            self._shown = False

    def warn(self, text: str) -> None:
        """One line on stderr, terminal or not: the result stands, but not quite as asked."""
        self.clear()
        print(f"{self.tool}: warning: {text}", file=self.stream, flush=True)
