"""Messages between a rank and its server: one datagram each on a Unix socket; large payloads travel as a memfd, written once.

The same datagrams serve the coordinator (prism-record) and the assistant (prism-slice, prism-replay). Times are the rank's
machine's, in both directions; the server converts them.

rank → server                                            server → rank
  ("group", slot, name, desc, backend, ranks)              ("go",)                       start running
  ("site", index, text)                                    ("done", opid, descs, when, peer)  + tensors
                                                           ("failed", opid, text, when, -1)  its wait raises RuntimeError
  ("op", opid, node, slot, op, reduce, root, peer, tag,    ("pending",)                  answer to "test"
         descs, inputs, callsite, time_ns, sync,           ("ok", value)                 answer to store requests and "leave"
         factor, whole)  + tensors                         ("error", text)
  ("wait", opid)  ("test", opid)  ("watch", opid)
  ("store", function, arguments)                           ("dump",)                     give up: send your trace and exit
  ("channel",) + socket  ("push",) + socket                ("read",)                     a watched completion is on the main socket
  ("trace", trace)  ("leave", status)  ("iteration", number)
"""

from __future__ import annotations

import array
import ctypes
import functools
import mmap
import os
import pickle
import socket
import struct
from collections import deque
from typing import Any

HEADER = struct.Struct("<IQB")
INLINE = 48_000  # bytes of one datagram; a Unix socket's buffer holds four of them by default
DATAGRAM = 64_000
MESSAGE, PAYLOAD = 1, 2  # what a memfd carries instead of the datagram (bits of the header)
EMPTY = memoryview(b"")


def descs_of(tensors: list[Any]) -> list[tuple[str, int]]:
    """The (dtype name, elements) of each tensor, as messages carry them."""
    return [(dtype_name(tensor.dtype), tensor.numel()) for tensor in tensors]


@functools.cache
def dtype_name(dtype: Any) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def itemsize(dtype_name: str) -> int:
    """Bytes of one element."""
    import torch

    return getattr(torch, dtype_name).itemsize


class Parcel:
    """Payload bytes, packed once and sent to any number of receivers: inline, or as one memfd that they all map."""

    def __init__(self, buffers: list[Any], most_inline: int = INLINE) -> None:
        self.size = sum(len(buffer) for buffer in buffers)
        self.inline = b"".join(buffers) if self.size <= most_inline else b""
        self.fd = -1
        if self.size > most_inline:
            self.fd = memfd(buffers)

    def view(self) -> memoryview:
        """The bytes, which stay there after the parcel."""
        return map_fd(os.dup(self.fd))[: self.size] if self.fd >= 0 else memoryview(self.inline)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


NOTHING = Parcel([])


def raw_bytes(tensor: Any) -> Any:
    """The tensor's bytes, row-major: a view of its memory, or of a copy where it is not contiguous."""
    import torch

    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return EMPTY
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if size <= INLINE:  # a copy by address costs a tenth of a chain of views
        return ctypes.string_at(tensor.data_ptr(), size)
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def pack(tensors: list[Any]) -> Parcel:
    """A parcel with the tensors' bytes, one after the other."""
    return Parcel([raw_bytes(tensor) for tensor in tensors]) if tensors else NOTHING


def memfd(buffers: list[Any]) -> int:
    """A memfd holding the buffers one after the other; the caller closes it."""
    fd = os.memfd_create("prism", os.MFD_CLOEXEC)
    try:
        for buffer in buffers:
            view = memoryview(buffer)
            while len(view):
                view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def encode(blob: bytes, parcel: Parcel) -> tuple[list[bytes], list[int], Parcel | None]:
    """Parts of the datagram with a pickled message, the descriptors that go with it, and what must live until it is sent."""
    by_fd, fds = (PAYLOAD, [parcel.fd]) if parcel.fd >= 0 else (0, [])
    if HEADER.size + len(blob) + len(parcel.inline) <= DATAGRAM:
        return [HEADER.pack(len(blob), parcel.size, by_fd), blob, parcel.inline], fds, None
    carrier = Parcel([blob], most_inline=0)  # a trace, a large store value, or thousands of tensors
    return [HEADER.pack(len(blob), parcel.size, by_fd | MESSAGE), parcel.inline], [carrier.fd, *fds], carrier


def send(
    sock: socket.socket, message: tuple, parcel: Parcel = NOTHING, fds: tuple[int, ...] = (), flags: int = 0
) -> None:
    """Send one datagram. BlockingIOError with MSG_DONTWAIT on a full socket, OSError when the peer is gone."""
    send_pickled(sock, pickle.dumps(message, 5), parcel, fds, flags)


def send_pickled(
    sock: socket.socket, blob: bytes, parcel: Parcel = NOTHING, fds: tuple[int, ...] = (), flags: int = 0
) -> None:
    """Send a message that is pickled already, like ``send``."""
    parts, own_fds, _keep = encode(blob, parcel)
    descriptors = [*own_fds, *fds]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg(parts, ancillary, flags)


def receive(sock: socket.socket) -> tuple[tuple, memoryview, list[int]]:
    """Receive one datagram: (message, payload, passed descriptors). EOFError when the peer has closed."""
    blob, payload, fds = receive_pickled(sock)
    return pickle.loads(blob), payload, fds


def receive_pickled(sock: socket.socket) -> tuple[memoryview, memoryview, list[int]]:
    """Receive one datagram like ``receive``, and leave the message as it came."""
    data, ancillary, _flags, _address = sock.recvmsg(DATAGRAM, 64)
    if not data:
        raise EOFError
    fds: list[int] = []
    for _level, _kind, raw in ancillary:
        fds.extend(array.array("i", raw[: len(raw) - len(raw) % 4]))
    length, size, by_fd = HEADER.unpack_from(data)
    end = HEADER.size
    if by_fd & MESSAGE:
        blob = map_fd(fds.pop(0))[:length]
    else:
        end += length
        blob = memoryview(data)[HEADER.size : end]
    # torch wants a writable buffer
    payload = map_fd(fds.pop(0))[:size] if by_fd & PAYLOAD else memoryview(bytearray(data[end:]))
    return blob, payload, fds


def map_fd(fd: int) -> memoryview:
    """Map a received memfd (private: nobody else sees writes) and close the descriptor."""
    try:
        return memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)


class Peer:
    """A server's end of one socket: sends never block the server; what does not fit waits for ``flush``.

    ``full``: the set of peers with something to flush, shared by a server's peers.
    """

    def __init__(self, sock: socket.socket, full: set[Peer]) -> None:
        self.sock = sock
        self.queue: deque[tuple[bytes, Parcel]] = deque()
        self.full = full

    def send(self, message: tuple, parcel: Parcel = NOTHING) -> None:
        """Send now, or queue in order. A peer that is gone is noticed by its closed socket, not here."""
        self.send_pickled(pickle.dumps(message, 5), parcel)

    def send_pickled(self, blob: bytes, parcel: Parcel = NOTHING) -> None:
        """The same for a message that is pickled already."""
        self.queue.append((blob, parcel))
        self.flush()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it."""
        while self.queue:
            try:
                send_pickled(self.sock, *self.queue[0], flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                self.full.add(self)
                return
            except ConnectionError:
                self.queue.clear()
                break
            self.queue.popleft()
        self.full.discard(self)
