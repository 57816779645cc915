"""Progress is for terminals only; warnings are for everybody."""

import io

from prism_tools.cli import progress as module
from prism_tools.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_only_on_a_terminal(monkeypatch):
    monkeypatch.setattr(module, "MOVING", 60.0)  # this process may be interrupted
    for stream, shown in [(io.StringIO(), ""), (Terminal(), "prism-test: 8 ranks\n\r\x1b[K  iteration 1\r\x1b[K")]:
        progress = Progress("prism-test", stream)
        progress.say("8 ranks")
        progress.update("iteration 1")
        progress.update("iteration 2")  # too soon
        progress.clear()
        progress.clear()
        assert stream.getvalue() == shown


def test_warning_is_always_said():
    stream = io.StringIO()
    Progress("prism-test", stream).warn("ranks 0-3 of node 0 only")
    assert stream.getvalue() == "prism-test: warning: ranks 0-3 of node 0 only\n"


def test_a_log_gets_lines_now_and_then():
    stream = io.StringIO()
    progress = Progress("prism-test", stream)
    progress.update("nobody asked")
    progress.log = True
    progress.say("8 ranks")
    assert progress.due()
    progress.update("iteration 1")
    assert not progress.due()
    progress.update("iteration 2")  # too soon
    progress.clear()
    assert stream.getvalue() == "prism-test: 8 ranks\nprism-test: iteration 1\n"
