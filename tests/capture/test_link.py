"""The line between a server and agents: frames of any size, in both directions at once, and strangers turned away."""

import select
import socket

import pytest

from prism_tools.capture.link import GREETING, Guest, Link, greet

SECRET = "5" * 64


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def test_frames_of_any_size(pair):
    full = set()
    ours, theirs = (Link(sock, full) for sock in pair)
    large = bytes(range(256)) * (1 << 16)  # 16 MiB: no socket takes it at once
    sent = [(3, 0, b"a", b""), (4, 2, b"", large), (-1, -1, b"b" * 70_000, b"c")]
    for frame in sent:
        ours.send(*frame[:3], memoryview(frame[3]))
        theirs.send(*frame[:3], memoryview(frame[3]))
    assert full == {ours, theirs} and ours.queued > 1 << 20
    got = []
    while len(got) < 6:
        for link in (ours, theirs):
            got += [(rank, channel, bytes(blob), bytes(payload)) for rank, channel, blob, payload in link.frames()]
            link.flush()
    assert sorted(got) == sorted(sent * 2)
    assert not full and ours.queued == theirs.queued == 0


def test_payloads_are_writable_and_the_end_is_noticed(pair):
    ours, theirs = (Link(sock, set()) for sock in pair)
    ours.send(1, 0, b"m", memoryview(b"abc"))
    ours.close()
    frames = theirs.frames()
    *_, payload = next(frames)
    payload[0] = 0
    with pytest.raises(EOFError):
        next(frames)


def test_an_end_before_all_was_read_is_an_end(pair):
    """It resets the line: whether an agent that was killed had something to read is chance."""
    ours, theirs = (Link(sock, set()) for sock in pair)
    theirs.send(1, 0, b"m")
    assert select.select([ours.sock], [], [], 60)[0]
    ours.send(2, 0, b"last")
    ours.close()
    frames = theirs.frames()
    assert bytes(next(frames)[2]) == b"last"
    with pytest.raises(EOFError, match="^$"):
        next(frames)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (GREETING.pack(SECRET.encode(), 2, b"n3"), (2, "n3")),
        (GREETING.pack(b"6" * 64, 2, b"n3"), (-1, "")),
        (b"GET / HTTP/1.0\r\n\r\n", (None, "")),
    ],
)
def test_who_may_come(said, heard, pair):
    guest = Guest(pair[0])
    assert guest.heard(SECRET) == (None, "")
    pair[1].sendall(said)
    select.select([pair[0]], [], [], 5)
    assert guest.heard(SECRET) == heard
    assert (pair[0].fileno() < 0) == (heard[0] == -1)


def test_a_stranger_that_goes(pair):
    guest = Guest(pair[0])
    pair[1].close()
    select.select([pair[0]], [], [], 5)
    assert guest.heard(SECRET) == (-1, "") and pair[0].fileno() < 0


def test_an_agent_greets(pair):
    greet(pair[1], SECRET, 1, "n2")
    select.select([pair[0]], [], [], 5)
    assert Guest(pair[0]).heard(SECRET) == (1, "n2")
