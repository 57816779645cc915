"""Ranks that ask for the same again and again, in vain: since when, and for what."""

from __future__ import annotations

import time
from typing import Any

from prism_tools.capture.kv import CHANGES

PATIENCE = 120.0  # seconds after which ranks that only ask in vain, and nobody else can run, count as blocked for ever
GAP = 2.5  # seconds without a question after which a rank does something else
KNOWN = 1024  # answers that are remembered


class Polls:
    """One rank's questions since it last did anything else. ``begun``: when the first was asked again and had the same
    answer (seconds, monotonic); ``question``: the last of these, ("test", opid) or (function, arguments)."""

    def __init__(self) -> None:
        self.begun = self._last = 0.0
        self.question: tuple[str, Any] = ("", None)
        self._answers: dict[tuple[str, Any], Any] = {}

    @property
    def since(self) -> float:
        """When it began to poll; 0.0: it does not, or no more."""
        return self.begun if time.monotonic() - self._last <= GAP else 0.0

    def news(self) -> None:
        """The rank has done something else, or learnt something."""
        if self._answers:
            self._answers.clear()
        self.begun = 0.0

    def in_vain(self, question: tuple[str, Any], answer: Any) -> bool:
        """Note a question; whether it has had this answer before, with nothing but such questions in between."""
        before = self._answers.get(question, self)
        if before == answer:
            self.begun = self.since or time.monotonic()
            self.question, self._last = question, time.monotonic()
            return True
        if before is not self or len(self._answers) >= KNOWN:
            self._answers.clear()
        self._answers[question] = answer
        self.begun = 0.0
        return False

    def text(self) -> str:
        """The last question, as messages show it: "store.check(['go'])"."""
        function, arguments = self.question
        return f"store.{function}({arguments})"


def is_question(function: str, arguments: tuple) -> bool:
    """Whether a store call may change nothing. An addition of 0 asks for the sum, as a failing compare_set does."""
    return (
        function not in CHANGES or function in ("compare_set", "delete_key") or (function, arguments[-1]) == ("add", 0)
    )
