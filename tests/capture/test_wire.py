"""Messages and payloads over a Unix socket: inline, by memfd, oversized; and no descriptor is ever left open."""

import os
import socket

import pytest
import torch

from prism_tools.capture import wire


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def through(pair, message, parcel=wire.NOTHING, fds=()):
    wire.send(pair[0], message, parcel, fds)
    return wire.receive(pair[1])


def test_a_small_payload_travels_in_the_datagram(pair):
    parcel = wire.pack([torch.tensor([1.5, -2.0]), torch.tensor([7], dtype=torch.int16)])
    assert parcel.fd == -1 and parcel.size == 10
    message, payload, fds = through(pair, ("op", 3, [("float32", 2)], b"x"), parcel)
    assert message == ("op", 3, [("float32", 2)], b"x") and fds == []
    assert torch.frombuffer(payload, dtype=torch.float32, count=2).tolist() == [1.5, -2.0]
    assert torch.frombuffer(payload, dtype=torch.int16, count=1, offset=8).tolist() == [7]


def test_a_large_payload_travels_as_a_memfd(pair):
    tensor = torch.arange(100_000, dtype=torch.int64)
    parcel = wire.pack([tensor, tensor[:3]])
    assert parcel.fd >= 0 and parcel.size == 800_024
    message, payload, fds = through(pair, ("done", 1), parcel)
    assert message == ("done", 1) and fds == [] and len(payload) == 800_024
    assert torch.equal(torch.frombuffer(payload, dtype=torch.int64, count=100_000), tensor)


@pytest.mark.parametrize("size", [wire.INLINE - 1, wire.INLINE, wire.INLINE + 1, wire.DATAGRAM])
def test_sizes_around_the_limit(pair, size):
    data = bytes(k % 251 for k in range(size))
    _, payload, _ = through(pair, ("op", "y" * 20_000), wire.Parcel([data]))
    assert bytes(payload) == data


@pytest.mark.parametrize("size", [wire.INLINE // 2 - 100, wire.INLINE // 2 + 1, 5_000_000])
def test_a_large_message(pair, size):
    message, payload, fds = through(pair, ("trace", b"z" * size))
    assert message == ("trace", b"z" * size) and len(payload) == 0 and fds == []


def test_a_large_message_with_a_payload_is_not_sent_without_it(pair):
    """Thousands of tensors: their descriptions alone fill a datagram."""
    for data in (b"", b"abc", b"a" * wire.INLINE, b"a" * 100_000):
        message, payload, fds = through(pair, ("op", "z" * wire.DATAGRAM), wire.Parcel([data]))
        assert (message, bytes(payload), fds) == (("op", "z" * wire.DATAGRAM), data, [])


def test_receivers_of_one_parcel_share_it_and_do_not_see_each_other(pair):
    parcel = wire.Parcel([b"a" * 100_000])
    wire.send(pair[0], ("one",), parcel)
    wire.send(pair[0], ("two",), parcel)
    first, second = wire.receive(pair[1])[1], wire.receive(pair[1])[1]
    first[:3] = b"xyz"
    assert bytes(first[:4]) == b"xyza" and bytes(second[:4]) == b"aaaa"


def test_a_socket_can_be_passed(pair):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        message, _, fds = through(pair, ("channel",), fds=(theirs.fileno(),))
        assert message == ("channel",)
        with socket.socket(fileno=fds[0]) as passed:
            wire.send(passed, ("hello",))
            assert wire.receive(ours)[0] == ("hello",)


def test_a_closed_peer(pair):
    pair[1].close()
    with pytest.raises(OSError):
        wire.send(pair[0], ("go",))
    other, gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone.close()
    with other, pytest.raises(EOFError):
        wire.receive(other)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_thousand_sends_leave_no_descriptor(pair, size):
    data, before = b"a" * size, open_descriptors()
    for number in range(1000):
        message, payload, fds = through(pair, ("op", number), wire.Parcel([data]))
        assert message == ("op", number) and len(payload) == size and not fds
    del payload  # a mapping holds its own descriptor
    assert open_descriptors() == before


def test_a_peer_that_does_not_read_does_not_block_the_server(pair):
    """What the socket does not take waits in order, its memfds open only until they are sent."""
    before = open_descriptors()
    full: set = set()
    peer = wire.Peer(pair[0], full)
    for number in range(500):
        peer.send(("done", number), wire.Parcel([bytes([number % 256]) * (100_000 if number % 50 == 0 else 1000)]))
    assert peer.queue and full == {peer}
    for number in range(500):
        message, payload, _ = wire.receive(pair[1])
        assert message == ("done", number) and payload[0] == number % 256
        peer.flush()
    del payload
    assert not peer.queue and not full and open_descriptors() == before


def test_a_peer_that_has_gone_is_forgotten(pair):
    peer = wire.Peer(pair[0], set())
    pair[1].close()
    peer.send(("done", 1), wire.Parcel([b"a" * 100_000]))
    assert not peer.queue


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.uint8]
)
def test_the_bytes_of_a_tensor(dtype):
    tensor = (torch.arange(12).view(3, 4) % 2).to(dtype)
    data = wire.raw_bytes(tensor.t())
    assert len(data) == 12 * dtype.itemsize and wire.itemsize(str(dtype)[6:]) == dtype.itemsize
    again = torch.frombuffer(bytearray(data), dtype=dtype).view(4, 3)
    assert torch.equal(again, tensor.t())
    assert len(wire.raw_bytes(tensor[:0])) == 0


def test_the_bytes_of_a_tensor_with_a_gradient_and_of_a_number():
    assert bytes(wire.raw_bytes(torch.ones(1, requires_grad=True))) == b"\0\0\x80\x3f"
    assert bytes(wire.raw_bytes(torch.tensor(3, dtype=torch.int16))) == b"\x03\0"
