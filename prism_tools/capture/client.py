"""A rank's line to its server: requests, operations, and completions that arrive in any order and on any thread."""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prism_tools.capture import wire

if TYPE_CHECKING:
    from prism_tools.capture.work import RemoteWork

SERVER_GONE = 97  # exit status of a rank whose server closed the line; the server reports its own reason


class Client:
    """One socket per thread that talks; the server answers on the socket that asked.

    ``announce``: tell the server where this rank blocks (record: it gives up its slot), instead of only reading.
    ``on_dump``: called when the server gives up and wants this rank's trace; must not return.
    """

    def __init__(self, sock: socket.socket, announce: bool) -> None:
        self.announce = announce
        self.on_dump: Callable[[], None] = lambda: os._exit(1)
        self._main = sock
        self._main_thread = threading.get_ident()
        self._sockets: dict[int, socket.socket] = {self._main_thread: sock}
        self._done: dict[int, tuple[tuple, memoryview]] = {}
        self._watched: dict[int, RemoteWork] = {}
        self._push: socket.socket | None = None
        self._push_thread = 0
        self._planned: list[
            tuple[int, int, RemoteWork, tuple, memoryview]
        ] = []  # completions in the order of their times
        self._next = 0
        self._lock = threading.Lock()
        self._reading = threading.RLock()  # held while a thread reads the main socket
        self._unread = False  # the second thread was told to look there, and could not
        self._handed: queue.SimpleQueue[tuple[RemoteWork, tuple, memoryview]] = (
            queue.SimpleQueue()
        )  # for the second thread
        self._bell, self._ring = socket.socketpair()  # says that something was handed over

    def wait_for_go(self) -> None:
        """Block until the server gives this rank its first turn."""
        self._read(self._main)

    def new_id(self) -> int:
        """A number for an operation, unique in this rank."""
        with self._lock:
            self._next += 1
            return self._next

    def close(self) -> None:
        """Close every socket (in a child that the rank forked)."""
        for sock in (*self._sockets.values(), self._bell, self._ring):
            sock.close()

    def post(self, message: tuple, parcel: wire.Parcel = wire.NOTHING) -> None:
        """Send without waiting for an answer."""
        try:
            wire.send(self._socket(), message, parcel)
        except ConnectionError:
            os._exit(SERVER_GONE)

    def request(self, message: tuple) -> Any:
        """Send and wait for the answer. RuntimeError with the server's text if it refuses."""
        sock = self._socket()
        self.post(message)
        while True:
            with self._turn(sock):
                answer, payload = self._read(sock)
            if answer[0] == "ok":
                return answer[1]
            self._keep(answer, payload)

    def wait(self, opid: int, announced: bool) -> tuple[tuple, memoryview]:
        """Block until the operation's completion is here: (message, payload)."""
        sock = self._socket()
        if opid not in self._done and self.announce and not announced:
            self.post(("wait", opid))
        while True:
            with self._turn(sock):
                if opid in self._done:
                    return self._done.pop(opid)
                self._keep(*self._read(sock))

    def test(self, opid: int) -> tuple[tuple, memoryview] | None:
        """The completion if it is here. Record: a "not yet" gives other ranks a turn first."""
        sock = self._socket()
        if not self.announce:
            with self._turn(sock):
                self._drain(sock)
        elif opid not in self._done:
            self.post(("test", opid))
            while opid not in self._done:
                with self._turn(sock):
                    answer, payload = self._read(sock)
                if answer[0] == "pending":
                    return None
                self._keep(answer, payload)
        return self._done.pop(opid, None)

    def watch(self, work: RemoteWork) -> None:
        """Have ``work`` completed by a second thread, for C++ that waits on its Future without calling Python."""
        with self._lock:
            self._watched[work.opid] = work
            if self._push is None:
                self._push = self._channel("push")
                threading.Thread(target=self._run_push, args=(self._push,), daemon=True, name="prism-push").start()
        found = self._done.pop(work.opid, None)
        if found is None:
            self.post(("watch", work.opid))
        else:
            self._keep(*found)

    def _run_push(self, sock: socket.socket) -> None:
        self._push_thread = threading.get_ident()
        self._sockets[self._push_thread] = sock
        self._pump(sock, lambda: False)

    def wait_for(self, event: threading.Event) -> None:
        """Block until a watched operation's event. A callback that waits runs on the second thread, which goes on meanwhile."""
        if self._push is not None and threading.get_ident() == self._push_thread:
            self._pump(self._push, event.is_set)
        event.wait()

    def _pump(self, sock: socket.socket, ended: Callable[[], bool]) -> None:
        """The second thread: completes watched operations, each at its time."""
        planned = self._planned
        while not ended():
            wait = (planned[0][0] - time.monotonic_ns()) / 1e9 if planned else None
            ready, _, _ = select.select([sock, self._bell], [], [], None if wait is None else max(wait, 0))
            if self._bell in ready:
                self._bell.recv(1)
                work, answer, payload = self._handed.get()
                heapq.heappush(planned, (answer[3], work.opid, work, answer, payload))
            if sock in ready:
                answer, payload = self._read(sock)
                if answer[0] == "read":
                    self._look_at_main()
                else:
                    self._keep(answer, payload)
            while planned and planned[0][0] <= time.monotonic_ns() and not ended():
                _, _, work, answer, payload = heapq.heappop(planned)
                work.complete(answer, payload)

    def _look_at_main(self) -> None:
        """Take in what lies on the main socket, or leave it to the main thread, which reads or is about to stop reading."""
        self._unread = True
        if self._reading.acquire(blocking=False):
            try:
                self._unread = False
                self._drain(self._main)
            finally:
                self._reading.release()

    @contextlib.contextmanager
    def _turn(self, sock: socket.socket) -> Iterator[None]:
        """Reading ``sock``; the main socket has two readers."""
        if sock is not self._main:
            yield
            return
        with self._reading:
            yield
            if self._unread:
                self._unread = False
                self._drain(sock)

    def _keep(self, answer: tuple, payload: memoryview) -> None:
        """A completion that nobody on this thread waits for right now."""
        work = self._watched.pop(answer[1], None)
        if work is None:
            self._done[answer[1]] = (answer, payload)
        else:
            self._handed.put((work, answer, payload))
            self._ring.send(b"!")

    def _drain(self, sock: socket.socket) -> None:
        """Take in what has arrived, without blocking."""
        while True:
            try:
                sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._keep(*self._read(sock))

    def _read(self, sock: socket.socket) -> tuple[tuple, memoryview]:
        try:
            answer, payload, _fds = wire.receive(sock)
        except (EOFError, ConnectionError):
            os._exit(SERVER_GONE)
        if answer[0] == "dump":
            self.on_dump()
        if answer[0] == "error":
            raise RuntimeError(f"prism: {answer[1]}")
        return answer, payload

    def _socket(self) -> socket.socket:
        thread = threading.get_ident()
        sock = self._sockets.get(thread)
        if sock is None:
            sock = self._sockets[thread] = self._channel("channel")
        return sock

    def _channel(self, kind: str) -> socket.socket:
        """A new socket pair whose other end the server gets over the main socket."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            wire.send(self._main, (kind,), fds=(theirs.fileno(),))
        return mine
