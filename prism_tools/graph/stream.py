"""Files and pipes as seekable streams: spooled input, and output that appears whole or not at all. Knows no HDF5."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from prism_tools.errors import PrismError

IN_MEMORY = 256 << 20  # bytes of a pipe that are kept in memory; more go to a temporary file
CHUNK = 1 << 20

_REMEDIES = {
    errno.EISDIR: "name a file in it",
    errno.ENOSPC: "free some, or choose a larger file system",
    errno.EDQUOT: "free some, or choose another file system",
    errno.EMFILE: "raise ulimit -n",
}


@dataclass
class Source:
    """An input: a seekable ``stream``, its ``name`` for messages, the ``owner`` (uid) of its file or -1 for a pipe."""

    stream: IO[bytes]
    name: str
    owner: int


@contextlib.contextmanager
def source(path: str) -> Iterator[Source]:
    """Open ``path`` ("-": standard input); what cannot seek is read to its end first. PrismError if that fails."""
    name = "standard input" if path == "-" else path
    try:
        fd = os.dup(0) if path == "-" else _open(path)
        mode = os.fstat(fd)
        with open(fd, "rb", buffering=0) as raw:
            if raw.isatty():
                raise PrismError(f"{name}: is a terminal; give a file or a pipe")
            if stat.S_ISREG(mode.st_mode):
                yield Source(raw, name, mode.st_uid)
            else:
                with _spooled(raw, name) as stream:
                    yield Source(stream, name, mode.st_uid if path != "-" else -1)
    except OSError as error:
        remedy = "check the name" if error.errno == errno.ENOENT else "check its permissions"
        raise _refusal(name, "cannot be read", error, remedy) from None


def _open(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    return fd


def save(path: str, build: Callable[[IO[bytes]], None], size: int) -> None:
    """Have ``build`` write into a seekable stream, then put its bytes at ``path`` ("-": standard output), whole.

    ``size``: about how many bytes come. A file is replaced only when all bytes are on the disk; whatever goes wrong,
    the old file stays and no other is left. PrismError names the problem. Pipes and devices get the bytes at the end.
    """
    name = "standard output" if path == "-" else path
    try:
        if path == "-" or _is_special(path):
            _save_special(path, name, build, size)
        else:
            _save_file(os.path.realpath(path), build)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _not_written(name, error) from None


def check_place(path: str) -> None:
    """PrismError if ``save`` could not put a file at ``path``: before long work, rather than after it."""
    if path == "-" or _is_special(path):
        return
    place = os.path.realpath(path)
    try:
        _refuse_folder(place)
        tempfile.TemporaryFile(dir=os.path.dirname(place)).close()
    except OSError as error:
        raise _not_written(path, error) from None


class _Guard(io.RawIOBase):
    """A stream that remembers the first failure of a write and then pretends to go on.

    HDF5 cannot close a file whose writes fail; it can close this one. The caller asks for ``error`` afterwards.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while self.error is None and done < len(view):
                done += self.stream.write(view[done:])
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return self.stream.truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0

    def readinto(self, buffer: Any) -> int:
        return self.stream.readinto(buffer)  # type: ignore[attr-defined]

    def seek(self, position: int, whence: int = 0) -> int:
        return self.stream.seek(position, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True


def _build(build: Callable[[IO[bytes]], None], stream: IO[bytes]) -> None:
    """Run ``build`` on ``stream``; OSError of the first write that failed."""
    guard = _Guard(stream)
    try:
        with signals_wait():
            build(guard)  # type: ignore[arg-type]
    except Exception:
        if guard.error is None:
            raise
    if guard.error is not None:
        raise guard.error


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Keep handlers that raise (Ctrl-C) from running until the end: raised within HDF5 they would wreck its state, and
    between two files that belong together they would leave one without the other.

    Blocking the signals would not do: libraries' threads take them, and Python then runs the handler here all the same.
    """
    waiting: list[int] = []
    old = {}
    if threading.current_thread() is threading.main_thread():  # handlers run in no other thread
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            if callable(signal.getsignal(number)):
                old[number] = signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for caught in dict.fromkeys(waiting):
            signal.raise_signal(caught)


def _save_file(path: str, build: Callable[[IO[bytes]], None]) -> None:
    folder, name = os.path.split(path)
    _refuse_folder(path)
    # 200 bytes of the name: the whole must stay below the file system's 255
    short = os.fsdecode(os.fsencode(name)[:200])
    temporary = os.path.join(folder, f".{short}.prism-{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "r+b", buffering=0) as stream:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode))
            _build(build, stream)
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """Make the rename last; some file systems cannot, and the file itself is already safe."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _is_special(path: str) -> bool:
    """Whether ``path`` exists and is a pipe or a device: these are written to, not replaced."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _save_special(path: str, name: str, build: Callable[[IO[bytes]], None], size: int) -> None:
    fd = os.dup(1) if path == "-" else os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    with open(fd, "wb", buffering=0) as target:
        if target.isatty():
            raise PrismError(f"{name}: is a terminal; give -o FILE, or pipe it into the next tool")
        with io.BytesIO() if size <= IN_MEMORY else _temporary(name) as stream:
            _build(build, stream)
            stream.seek(0)
            if path == "-":
                sys.stdout.flush()
            while chunk := stream.read(CHUNK):
                view = memoryview(chunk)
                while view:
                    view = view[target.write(view) :]


def _spooled(raw: IO[bytes], name: str) -> IO[bytes]:
    """All of a pipe, in memory while it is small."""
    parts, size = [], 0
    while size <= IN_MEMORY and (chunk := raw.read(CHUNK)):
        parts.append(chunk)
        size += len(chunk)
    if size <= IN_MEMORY:
        return io.BytesIO(b"".join(parts))
    stream = _temporary(name)
    try:
        for chunk in parts:
            stream.write(chunk)
        while chunk := raw.read(CHUNK):
            stream.write(chunk)
        stream.seek(0)
    except OSError as error:
        stream.close()
        raise _refusal(name, f"cannot be spooled to {_spool_folder()}", error, "set TMPDIR") from None
    return stream


def _temporary(name: str) -> IO[bytes]:
    """An unlinked file in $SLURM_TMPDIR, else $TMPDIR, else the system's folder."""
    try:
        return tempfile.TemporaryFile(dir=_spool_folder())
    except OSError as error:
        raise _refusal(name, f"cannot be spooled to {_spool_folder()}", error, "set TMPDIR") from None


def _spool_folder() -> str:
    return os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or tempfile.gettempdir()


def _refuse_folder(path: str) -> None:
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))


def _not_written(name: str, error: OSError) -> PrismError:
    remedy = "make its folder first" if error.errno == errno.ENOENT else "choose a folder you can write to"
    return _refusal(name, "cannot be written", error, remedy)


def _refusal(name: str, problem: str, error: OSError, remedy: str = "check its permissions") -> PrismError:
    remedy = _REMEDIES.get(error.errno or 0, remedy)
    return PrismError(f"{name}: {problem}: {error.strerror or error}; {remedy}")
