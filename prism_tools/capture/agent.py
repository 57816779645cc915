"""A node's agent: forks the ranks that a server elsewhere asks for, and passes on what they and the server say.

Started by capture/nodes.py through srun; how to begin comes as one line of JSON on standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from prism_tools.capture import ranks, wire
from prism_tools.capture.link import CONTROL, MAIN, Link, greet
from prism_tools.capture.server import Rank, Server
from prism_tools.errors import PrismError
from prism_tools.launch.placement import placement

AHEAD = 64 << 20  # bytes on their way to the server beyond which ranks must wait
GREET = 30.0  # seconds that an agent gets to reach the assistant beside its node


class Agent(Server):
    """Ranks of one node. What they say goes over ``link`` as it is; large payloads, memfds here, as bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.link = Link(sock, self.full)
        self.own.append(sock)
        self.selector.register(sock, selectors.EVENT_READ, self._obey)
        self.channels: dict[tuple[int, int], wire.Peer] = {}
        self.names: dict[wire.Peer, tuple[int, int]] = {}  # serial, channel

    def begin(self, start: dict[str, Any]) -> None:
        """Preload, and say so."""
        ranks.preload(start["warm"], start["modules"], start["pretend"])
        self.say("answer", None)

    def run(self) -> NoReturn:
        """Serve until the server is gone (EOFError)."""
        while True:
            while self.link.queued > AHEAD:
                select.select([self.link.sock], [self.link.sock], [])
                self.link.flush()
                self._obey()
            self.poll(None)

    def say(self, *message: Any, serial: int = CONTROL) -> None:
        """Tell the server something of our own, of a rank or of none."""
        self.link.send(serial, CONTROL, pickle.dumps(message, 5))

    def _obey(self) -> None:
        for serial, channel, blob, payload in self.link.frames():
            if channel != CONTROL:
                peer = self.channels.get((serial, channel))
                if peer is not None and peer.sock.fileno() >= 0:  # the rank may have ended meanwhile
                    peer.send_pickled(bytes(blob), wire.Parcel([payload]))
                continue
            kind, *arguments = pickle.loads(blob)
            if kind == "spawn":
                number, spec = arguments
                new = self.spawn(spec)
                self._name(number, MAIN, new.main)
                self.say("forked", new.pid, serial=number)
            elif kind == "ask":
                function, values = arguments
                self.say("answer", function(*values))
            elif kind == "through":
                self._go_through(*arguments)
                return

    def _go_through(self, host: str, port: int, secret: str) -> None:
        """The server's words come from now on through the assistant beside this node, and ours go there."""
        here = placement()
        try:
            sock = socket.create_connection((host, port), timeout=GREET)
            greet(sock, secret, here.rank, here.node)
        except OSError as error:
            raise PrismError(f"{host}: cannot connect to its assistant: {error.strerror or error}") from error
        self.say("answer", None)
        self.selector.unregister(self.link.sock)
        self.link = Link(sock, self.full)
        self.own.append(sock)  # the line before stays open until this process ends: its end would outrun our answer
        self.selector.register(sock, selectors.EVENT_READ, self._obey)

    def _name(self, serial: int, channel: int, peer: wire.Peer) -> None:
        self.channels[serial, channel] = peer
        self.names[peer] = serial, channel

    def arrived(self, rank: Rank, peer: wire.Peer, blob: memoryview, payload: memoryview, fds: list[int]) -> None:
        name = self.names.get(peer)
        if name is None:  # of a thread of a rank that has ended
            for fd in fds:
                os.close(fd)
            return
        if not fds:
            self.link.send(*name, blob, payload)
            return
        (kind,) = pickle.loads(blob)
        new = wire.Peer(socket.socket(fileno=fds[0]), self.full)
        self._channel(rank, kind, new)
        channel = len(rank.peers()) - 1
        self._name(name[0], channel, new)
        self.say("channel", kind, channel, serial=name[0])

    def on_gone(self, rank: Rank, signal_number: int) -> None:
        serial, _ = self.names[rank.main]
        for peer in rank.peers():
            del self.channels[self.names.pop(peer)]
        self.say("gone", -signal_number or rank.status, serial=serial)


def main(kind: type[Agent] = Agent) -> int:
    """Run until the server ends; returns the exit status."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the server has ended
        return 0
    start = json.loads(line)
    here = placement()
    host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or start["host"]
    try:
        sock = socket.create_connection((host, start["port"]), timeout=start["limit"])
        with contextlib.suppress(ConnectionError):  # the server has ended, as will be seen
            greet(sock, start["secret"], start["first"] + here.rank, here.node)
    except OSError as error:
        words = f"node {here.node}: {host}: cannot connect: {error.strerror or error}"
        print(f"{start['tool']}: {words}", file=sys.stderr)
        return 1
    os.environ.clear()
    os.environ.update(start["environ"])  # ranks have the server's, wherever they run
    # Slurm may have given its task one processor; ranks take turns on all of the job's.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    agent = kind(sock)
    try:
        os.chdir(start["cwd"])
        sys.path[:] = start["path"]
        agent._obey()  # EOFError: the server has ended; it says nothing before it is told that we are ready
        agent.begin(start)
        agent.run()
    except EOFError:
        return 0
    except (PrismError, OSError, ImportError) as error:
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else ""
        agent.say("failed", where or str(error))
        return 1
    finally:
        agent.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's end is ours
    raise SystemExit(main())
