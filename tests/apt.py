"""Debian's packages for tests, installed once, as root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def install(absent: Callable[[], list[str]], *packages: str) -> str:
    """Install ``packages`` if programs are ``absent``: which are still, and why; "" if none."""
    if not absent():
        return ""
    if os.geteuid():
        return f"no {', '.join(absent())}, and only root can install them"
    if shutil.which("apt-get") is None:
        return f"no {', '.join(absent())}, and no apt-get to install them"
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True, "timeout": 300}
    with open(Path(tempfile.gettempdir()) / "prism-apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of these tests may be installing
        words = ["install", "-y", "--no-install-recommends", *packages]
        for step in (["update"], words) if absent() else ():
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["apt-get", "-qq", *step], **quiet)  # type: ignore[call-overload]
        Path(lock.name).unlink(missing_ok=True)
    return f"apt-get did not install {', '.join(absent())}" if absent() else ""
