"""Running the tools in tests: real processes, what they say, and what they leave behind."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"
SUMS = ROOT / "tests" / "faults" / "sums.py"
GPT = ROOT / "share" / "prism" / "examples" / "gpt.py"
LIMIT = 300  # seconds for one tool, or for what is waited for: far more than any needs, on a busy machine too
MARK = "PRISM_TEST_RUN"  # environment variable by which the processes of one test are found


def program(name: str | Path) -> str:
    """Path of a program: of tests/programs, the example gpt.py, or given as a path."""
    return str(GPT if name == "gpt.py" else PROGRAMS / name)


def command(tool: str, *arguments: object) -> list[str]:
    """The command line that runs ``prism-TOOL`` with this interpreter."""
    return [sys.executable, str(ROOT / "bin" / f"prism-{tool}"), *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a tool, without settings that would change what it does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PRISM_", "SLURM_"))}
    kept.pop("PYTHONHASHSEED", None)
    return kept | {"PYTHONPATH": str(ROOT)} | more


@dataclass
class Result:
    """What a finished tool left: exit status (negative: the signal) and texts."""

    status: int
    stdout: str
    stderr: str

    def lines(self, word: str, ranks: set[int] | None = None) -> list[str]:
        return said(self.stdout, word, ranks)


def said(text: str, word: str, ranks: set[int] | None = None) -> list[str]:
    """The lines "WORD rank R …" of programs, sorted; only those of ``ranks``, if given."""
    found = sorted(line for line in text.splitlines() if line.startswith(f"{word} rank "))
    return found if ranks is None else [line for line in found if int(line.split()[2]) in ranks]


def run(tool: str, *arguments: object, cwd: Path, expect: int | None = 0, **more: str) -> Result:
    """Run a tool to its end in ``cwd``; ``more``: environment variables. Asserts the exit status unless None."""
    done = subprocess.run(
        command(tool, *arguments),
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert expect is None or done.returncode == expect, (done.returncode, done.stderr, done.stdout[-2000:])
    return Result(done.returncode, done.stdout, done.stderr)


def until(condition: Callable[[], object]) -> None:
    """Return as soon as ``condition()`` holds; fails after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)  # between two looks: what is waited for may need this core


def free_ports(address: str, count: int) -> list[int]:
    """Ports that nobody listens at, below those that the kernel gives away: what is started later still finds them free."""
    sockets: list[socket.socket] = []
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1000):
        try:
            sockets.append(socket.create_server((address, port)))
        except OSError:  # somebody's
            continue
        if len(sockets) == count:
            break
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    assert len(ports) == count
    return ports


def marked(mark: str) -> list[str]:
    """Command lines of the live processes whose environment carries ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
            except OSError:
                pass  # ended meanwhile, or not ours
    return found


def left_in_memory(known: set[str]) -> set[str]:
    """Names in /dev/shm, but for the ``known`` and what a live process has mapped: other tests may run beside this one."""
    names = set(os.listdir("/dev/shm")) - known
    mapped: set[str] = set()  # their numbers: a semaphore's name is not that of its making
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            mapped |= set(re.findall(r" (\d+) +/dev/shm/", maps.read_text(errors="replace")))
        except OSError:
            pass  # ended meanwhile, or not ours
    return {entry.name for entry in os.scandir("/dev/shm") if entry.name in names and str(entry.inode()) not in mapped}


def left_in(folder: Path) -> list[str]:
    """Names in a temporary folder, but for the empty cache that torch makes when it is imported."""
    names = sorted(os.listdir(folder))
    return [name for name in names if not name.startswith("torchinductor_") or os.listdir(folder / name)]


class Bench:
    """A place for one test's tools: ``out`` for their files, $TMPDIR watched, processes marked."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.spool = folder / "tmpdir"
        self.out.mkdir()
        self.spool.mkdir()
        self.mark = uuid.uuid4().hex
        self.shared = set(os.listdir("/dev/shm"))
        self.started: list[subprocess.Popen[str]] = []

    def variables(self) -> dict[str, str]:
        return {"TMPDIR": str(self.spool), MARK: self.mark}

    def run(self, tool: str, *arguments: object, expect: int | None = 0, **more: str) -> Result:
        return run(tool, *arguments, cwd=self.out, expect=expect, **self.variables(), **more)

    def start(
        self, tool: str, *arguments: object, group: int = 0, text: bool = True, **options: object
    ) -> subprocess.Popen[str]:
        """Start a tool in a process group of its own (0), as a shell does; stdout and stderr are pipes."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        child = subprocess.Popen(
            command(tool, *arguments),
            cwd=self.out,
            env=environment(**self.variables()),
            text=text,
            process_group=group,
            **pipes,  # type: ignore[call-overload]
        )
        self.started.append(child)
        return child

    def run_all(self, *calls: tuple, expect: int = 0) -> list[Result]:
        """Run several tools at the same time; each call is (tool, *arguments)."""
        children = [self.start(*call) for call in calls]
        results = []
        for call, child in zip(calls, children, strict=True):
            out, err = child.communicate(timeout=LIMIT)
            assert child.returncode == expect, (call, child.returncode, err)
            results.append(Result(child.returncode, out, err))
        return results

    def finish(self, child: subprocess.Popen[str]) -> Result:
        out, err = child.communicate(timeout=LIMIT)
        return Result(child.returncode, out, err)

    def files(self) -> set[str]:
        return set(os.listdir(self.out))

    def check_clean(self) -> None:
        """Nothing of ours runs any more, and no temporary file is left."""
        until(lambda: not marked(self.mark))
        assert left_in(self.spool) == []
        assert [name for name in os.listdir(self.out) if "tmp" in name or name.startswith(".")] == []
        until(lambda: not left_in_memory(self.shared))

    def close(self) -> None:
        for child in self.started:
            child.kill()
            child.wait()


class RealGloo:
    """Runs programs under real gloo through tests/fork_gloo.py; each (program, arguments, world) once a session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[tuple, str] = {}
        self.server: subprocess.Popen[str] | None = None

    def output(self, name: str, *arguments: object, world: int) -> str:
        """What all ranks printed."""
        argv = [program(name), *map(str, arguments)]
        key = (*argv, world)
        if key not in self.known:
            path = self.folder / f"real{len(list(self.folder.iterdir()))}"
            assert self._ask({"argv": argv, "world": world, "output": str(path)}) == [0] * world
            self.known[key] = path.read_text()
        return self.known[key]

    def _ask(self, request: dict) -> list[int]:
        if self.server is None:
            self.server = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "fork_gloo.py")],
                env=environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.server.stdin is not None and self.server.stdout is not None
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def close(self) -> None:
        if self.server is not None:
            assert self.server.stdin is not None
            self.server.stdin.close()
            self.server.wait()


SECRETS = {"TORCH_API_TOKEN": "sesame-1", "GLOO_SECRET": "sesame-2", "MY_VARIABLE": "sesame-3", "MKL_DYNAMIC": "FALSE"}


@dataclass
class Made:
    """A graph file that a tool made, and what the program printed meanwhile."""

    path: Path
    stdout: str
    stderr: str

    def lines(self, word: str, ranks: set[int] | None = None) -> list[str]:
        return said(self.stdout, word, ranks)


class Stages:
    """Files of each stage, made when first asked for and kept for the session. Tests must not change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[tuple, Made] = {}

    def recorded(self, name: str | Path, *arguments: object, world: int, jobs: int = 2, options: tuple = ()) -> Made:
        key = ("record", "-n", world, "-j", jobs, *options, "--", program(name), *arguments)
        return self._make(key, lambda path: ["-o", path], **SECRETS)

    def sliced(self, bare: Made, *options: object) -> Made:
        return self._make(("slice", bare.path, "-s", 2, *options), lambda path: ["-o", path])

    def calibrated(self, sliced: Made) -> Made:
        return self._make(("calibrate", sliced.path), lambda path: ["-o", path])

    def replayed(self, calibrated: Made, ranks: str) -> Made:
        return self._make(("replay", "-r", ranks, calibrated.path), lambda path: ["-o", path])

    def _make(self, key: tuple, output: Callable[[Path], list], **more: str) -> Made:
        if key not in self.known:
            path = self.folder / f"{len(self.known)}-{key[0]}.h5"
            done = run(key[0], *output(path), *key[1:], cwd=self.folder, **more)
            self.known[key] = Made(path, done.stdout, done.stderr)
        return self.known[key]
