"""A node's agent: forks the ranks that the coordinator asks for, and passes on what they and the coordinator say.

Started by record/nodes.py through srun; how to begin comes as one line of JSON on standard input.
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
from prism_tools.capture.server import Rank, Server
from prism_tools.errors import PrismError
from prism_tools.launch.placement import placement
from prism_tools.record.link import CONTROL, MAIN, Link, greet

AHEAD = 64 << 20  # bytes on their way to the coordinator beyond which ranks must wait


class Agent(Server):
    """Ranks of one node. What they say goes over ``link`` as it is; large payloads, memfds here, as bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.link = Link(sock, self.full)
        self.own.append(sock)
        self.selector.register(sock, selectors.EVENT_READ, self._obey)
        self.channels: dict[tuple[int, int], wire.Peer] = {}
        self.numbers: dict[wire.Peer, int] = {}

    def run(self) -> NoReturn:
        """Serve until the coordinator is gone (EOFError)."""
        while True:
            while self.link.queued > AHEAD:
                select.select([self.link.sock], [self.link.sock], [])
                self.link.flush()
                self._obey()
            self.poll(None)

    def say(self, *message: Any) -> None:
        """Tell the coordinator something of our own."""
        self.link.send(CONTROL, CONTROL, pickle.dumps(message, 5))

    def _obey(self) -> None:
        for rank, channel, blob, payload in self.link.frames():
            peer = self.channels.get((rank, channel))
            if channel != CONTROL:
                if peer is not None and peer.sock.fileno() >= 0:  # the rank may have ended meanwhile
                    peer.send_pickled(bytes(blob), wire.Parcel([payload]))
                continue
            kind, *arguments = pickle.loads(blob)
            if kind == "spawn":
                new = self.spawn(arguments[0])
                self._name(new, MAIN, new.main)
                self.say("forked", new.number, new.pid)
            elif kind == "ask":
                function, values = arguments
                self.say("answer", function(*values))

    def _name(self, rank: Rank, channel: int, peer: wire.Peer) -> None:
        self.channels[rank.number, channel] = peer
        self.numbers[peer] = channel

    def arrived(self, rank: Rank, peer: wire.Peer, blob: memoryview, payload: memoryview, fds: list[int]) -> None:
        if not fds:
            self.link.send(rank.number, self.numbers[peer], blob, payload)
            return
        (kind,) = pickle.loads(blob)
        new = wire.Peer(socket.socket(fileno=fds[0]), self.full)
        self._channel(rank, kind, new)
        self._name(rank, len(rank.peers()) - 1, new)
        self.say("channel", rank.number, kind, self.numbers[new])

    def on_gone(self, rank: Rank, signal_number: int) -> None:
        self.say("gone", rank.number, -signal_number or rank.status)


def main() -> int:
    """Run until the coordinator ends; returns the exit status."""
    start = json.loads(sys.stdin.readline())
    here = placement()
    host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or start["host"]
    try:
        sock = socket.create_connection((host, start["port"]), timeout=start["limit"])
        greet(sock, start["secret"], here.rank, here.node)
    except OSError as error:
        print(f"prism-record: node {here.node}: {host}: cannot connect: {error.strerror or error}", file=sys.stderr)
        return 1
    os.environ.clear()
    os.environ.update(start["environ"])  # ranks have the coordinator's, wherever they run
    with contextlib.suppress(
        OSError
    ):  # Slurm may have given its task one processor; ranks take turns on all of the job's
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    agent = Agent(sock)
    try:
        os.chdir(start["cwd"])
        sys.path[:] = start["path"]
        ranks.preload(True, start["modules"], start["pretend"])
        agent.say("ready")
        agent.run()
    except EOFError:
        return 0
    except (PrismError, OSError, ImportError) as error:
        agent.say("failed", str(error))
        return 1
    finally:
        agent.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator's end is ours
    raise SystemExit(main())
