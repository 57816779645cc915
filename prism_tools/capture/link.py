"""The line between a server and one node's agent: frames over TCP, in both directions, that never block the sender."""

from __future__ import annotations

import hmac
import socket
import struct
from collections import deque
from collections.abc import Collection, Iterator

from prism_tools.capture.wire import EMPTY

CONTROL = -1  # in place of a channel's number: the agent's own words, of a rank; in place of both: of no rank
MAIN = 0  # the channel on which a rank's main thread talks
HEADER = struct.Struct("<iiQQ")  # serial, channel, bytes of the message and of the payload
GREETING = struct.Struct("64sI256s")  # the secret, the number of the step's task, the node's name
DEAD = 30_000  # milliseconds after which a machine that answers nothing is taken to be gone

Frame = tuple[int, int, memoryview, memoryview]  # serial, channel, pickled message, payload (writable)


class Link:
    """One end. ``full``: where links with something to flush are put, as wire.Peer does."""

    def __init__(self, sock: socket.socket, full: set) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD)
        self.sock = sock
        self.full = full
        self.queued = 0  # bytes
        self._out: deque[memoryview] = deque()
        self._head = memoryview(bytearray(HEADER.size))
        self._parts: deque[memoryview] = deque([self._head])  # to be filled next
        self._got = 0  # bytes of the first part
        self._frame: Frame | None = None

    def send(self, serial: int, channel: int, blob: bytes | memoryview, payload: memoryview = EMPTY) -> None:
        """Send now, or queue in order; ``serial``: of the rank, among all that the agent ever forked. A peer that is gone is
        noticed by ``frames``, not here."""
        views = [memoryview(HEADER.pack(serial, channel, len(blob), len(payload)) + blob), payload]
        self._out += filter(len, views)
        self.queued += sum(map(len, views))
        self.flush()

    def flush(self) -> None:
        """Send what is queued as far as the network takes it."""
        try:
            while self._out:
                count = self.sock.send(self._out[0])
                self.queued -= count
                self._out[0] = self._out[0][count:]
                if not self._out[0]:
                    self._out.popleft()
        except BlockingIOError:
            self.full.add(self)
            return
        except OSError:
            self._out.clear()
            self.queued = 0
        self.full.discard(self)

    def frames(self) -> Iterator[Frame]:
        """What has arrived. EOFError when the other end is gone, with what the system says of it, if it has not just ended. What
        is left when the caller stops comes next time."""
        while True:
            try:
                self._fill()
            except BlockingIOError:
                return
            except ConnectionResetError:  # the other end is gone, as ever; it had just not read all that was sent
                raise EOFError from None
            except OSError as error:
                raise EOFError(error.strerror) from error
            if self._frame is None:
                serial, channel, length, size = HEADER.unpack(self._head)
                self._frame = serial, channel, memoryview(bytearray(length)), memoryview(bytearray(size))
                self._parts += self._frame[2:]
            else:
                frame, self._frame = self._frame, None
                self._parts.append(self._head)
                yield frame

    def _fill(self) -> None:
        while self._parts:
            part = self._parts[0]
            while self._got < len(part):
                count = self.sock.recv_into(part[self._got :])
                if not count:
                    raise EOFError
                self._got += count
            self._parts.popleft()
            self._got = 0

    def close(self) -> None:
        """Close it; the other end sees that."""
        self.full.discard(self)
        self.sock.close()


def greet(sock: socket.socket, secret: str, task: int, node: str) -> None:
    """Say that we may come, and who we are."""
    sock.sendall(GREETING.pack(secret.encode(), task, node.encode()))


class Guest:
    """A connection that has yet to show the secret."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._said = b""

    def heard(self, secret: str) -> tuple[int | None, str]:
        """Its task and node; (None, "") before all has come; (-1, "") if it is a stranger: then it is closed."""
        try:
            more = self.sock.recv(GREETING.size - len(self._said))
        except BlockingIOError:
            return None, ""
        except OSError:
            more = b""
        self._said += more
        if more and len(self._said) < GREETING.size:
            return None, ""
        if more:
            shown, task, name = GREETING.unpack(self._said)
            if hmac.compare_digest(shown, secret.encode()):
                return task, name.rstrip(b"\0").decode()
        self.sock.close()
        return -1, ""


class Door:
    """Lets in at ``listener`` who shows the secret, and nobody else."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret
        self._guests: list[Guest] = []

    def sockets(self) -> list[socket.socket]:
        """What to wait for (readable) before the next ``admitted``."""
        return [self._listener, *(guest.sock for guest in self._guests)]

    def admitted(self, ready: Collection[socket.socket]) -> list[tuple[int, str, socket.socket]]:
        """Task, node and socket of those that have shown it by now; ``ready``: the readable sockets."""
        if self._listener in ready:
            self._guests.append(Guest(self._listener.accept()[0]))
        inside = []
        for guest in list(self._guests):
            task, name = guest.heard(self._secret)
            if task is not None:
                self._guests.remove(guest)
                if name:
                    inside.append((task, name, guest.sock))
        return inside

    def close(self) -> None:
        """Who has not shown it by now is not waited for."""
        for guest in self._guests:
            guest.sock.close()
