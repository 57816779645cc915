"""The payload store: what is kept, what is stored once, and what is refused."""

import errno
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from prism_tools.errors import PrismError
from prism_tools.graph.model import Payload
from prism_tools.graph.schema import DTYPES
from prism_tools.tensors.executor import unpack
from prism_tools.tensors.payload import BLOB, ENTRY, FOOTER, HEAD, SUMMARY, PayloadReader, PayloadWriter, checksum
from tests.tools import environment


def written(folder, contents, budget=1 << 20, name="run.payload"):
    """A committed store of {(rank, node): bytes}, and its description."""
    writer = PayloadWriter(str(folder / name), budget)
    for place, data in contents.items():
        writer.add(place, [("uint8", len(data))], memoryview(bytearray(data)))
    payload = writer.finish()
    writer.commit()
    return writer, payload


def test_contributions_come_back(tmp_path):
    contents = {(0, 1): b"abc", (7, 3): b"", (0, 5): os.urandom(76800)}
    writer, payload = written(tmp_path, contents)
    assert (payload.path, payload.mode, payload.bytes) == (str(tmp_path / "run.payload"), "all", HEAD + 3 + 76800)
    assert os.listdir(tmp_path) == ["run.payload"]
    reader = PayloadReader(payload)
    assert {place: bytes(reader.get(*place)) for place in contents} == contents
    assert reader.get(0, 2) is None and reader.get(8, 1) is None


def test_equal_contents_are_stored_once(tmp_path):
    contents = {(rank, node): bytes([node]) * 1000 for rank in range(8) for node in range(3)}
    _, payload = written(tmp_path, contents)
    assert payload.bytes == HEAD + 3 * 1000
    assert os.path.getsize(payload.path) == payload.bytes + 24 * ENTRY.itemsize + 3 * BLOB.itemsize + FOOTER.size
    reader = PayloadReader(payload)
    assert {place: bytes(reader.get(*place)) for place in contents} == contents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3000, 70_001])
def test_every_type_comes_back(dtype, count, tmp_path):
    """Noise and what can be compressed, alone and together; odd sizes; NaN and infinities are bits like others."""
    kind = getattr(torch, dtype)
    noise = torch.frombuffer(bytearray(os.urandom(count * kind.itemsize) or b"0"), dtype=torch.uint8)
    noise = (noise % 2 if dtype == "bool" else noise)[: count * kind.itemsize]
    calm = torch.zeros_like(noise)
    kept = {(0, 0): noise, (0, 1): calm, (0, 2): torch.cat([noise, calm])}
    writer = PayloadWriter(str(tmp_path / "run.payload"), 1 << 30)
    for place, data in kept.items():
        writer.add(place, [(dtype, len(data) // kind.itemsize)], memoryview(data.numpy()))
    payload = writer.finish()
    writer.commit()
    reader = PayloadReader(payload)
    for place, data in kept.items():
        (back,) = unpack([(dtype, len(data) // kind.itemsize)], reader.get(*place))
        assert back.dtype == kind and back.view(torch.uint8).equal(data)
    if count > 60_000:
        assert payload.bytes < HEAD + 1.02 * len(noise) + len(noise) + 10_000  # calm ones take next to nothing


def test_beyond_the_budget_there_are_summaries(tmp_path):
    """From the first that does not fit on; equal contents that are there already cost nothing, and are whole."""
    contents = {(0, 0): b"a" * 100, (0, 1): b"b" * 101, (0, 2): b"a" * 100, (0, 3): bytes([1, 2, 6])}
    writer, payload = written(tmp_path, contents, budget=HEAD + 200)
    assert writer.lost == 104 and writer.summarised == [(0, 1), (0, 3)] and payload.bytes == HEAD + 100
    reader = PayloadReader(payload)
    assert reader.get(0, 1) is None and reader.get(0, 3) is None
    assert bytes(reader.get(0, 2)) == b"a" * 100
    *numbers, total = reader.summaries[1].tolist()
    assert numbers == [3, DTYPES.index("uint8"), 1, 3, 0, 1.0, 6.0, 3.0]
    assert bytes(total) == checksum(bytes([1, 2, 6]))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.5, float("nan"), -2.5]), (3, 1, -2.5, 1.5, -0.5)),
        (torch.tensor([1 + 2j, 3 - 4j]), (2, 0, -4.0, 3.0, 0.5)),
        (torch.tensor([1.0, 3.0]).to(torch.float8_e5m2), (2, 0, 1.0, 3.0, 2.0)),
        (torch.tensor([1.0, 3.0]).bfloat16(), (2, 0, 1.0, 3.0, 2.0)),
        (torch.tensor([True, False]), (2, 0, 0.0, 1.0, 0.5)),
        (torch.tensor([2.0, float("inf")]), (2, 0, 2.0, math.inf, math.inf)),
        (torch.empty(0), (0, 0, math.nan, math.nan, math.nan)),
        (torch.tensor([math.nan]), (1, 1, math.nan, math.nan, math.nan)),
    ],
)
def test_summaries(tensor, expected, tmp_path):
    writer = PayloadWriter(str(tmp_path / "run.payload"), 0)
    name = str(tensor.dtype).removeprefix("torch.")
    writer.add((3, 4), [(name, len(tensor))], memoryview(bytearray(tensor.view(torch.uint8).numpy())))
    payload = writer.finish()
    writer.commit()
    reader = PayloadReader(payload)
    found = reader.summaries[0]
    values = [found[key].item() for key in ("elements", "nans", "minimum", "maximum", "mean")]
    assert str(values) == str(list(expected)) and DTYPES[found["dtype"]] == name
    assert os.path.getsize(payload.path) == HEAD + ENTRY.itemsize + SUMMARY.itemsize + FOOTER.size


def test_essential_contributions_are_kept_whatever_the_budget(tmp_path):
    writer = PayloadWriter(str(tmp_path / "run.payload"), 0)
    writer.add((0, 0), [("uint8", 100)], bytearray(b"a" * 100))
    writer.add((0, 1), [("uint8", 100)], bytearray(b"b" * 100), essential=True)
    payload = writer.finish("none")
    writer.commit()
    assert writer.lost == 100 and payload.mode == "none"
    assert PayloadReader(payload).get(0, 0) is None and bytes(PayloadReader(payload).get(0, 1)) == b"b" * 100


def test_what_was_loaded_is_the_same(tmp_path):
    contents = {(0, 0): b"a" * 10_000, (1, 0): os.urandom(10_000), (1, 1): b"a" * 10_000}
    _, payload = written(tmp_path, contents)
    reader = PayloadReader(payload)
    reader.load([(0, 0), (1, 0), (5, 5)])
    os.truncate(payload.path, HEAD)
    assert {place: bytes(reader.get(*place)) for place in contents} == contents


def test_an_older_store_stays_until_the_new_one_is_committed(tmp_path):
    _, old = written(tmp_path, {(0, 0): b"old"})
    writer = PayloadWriter(old.path, 100)
    writer.add((0, 0), [("uint8", 3)], b"new")
    new = writer.finish()
    assert bytes(PayloadReader(old).get(0, 0)) == b"old"
    writer.commit()
    assert bytes(PayloadReader(new).get(0, 0)) == b"new"


def test_what_is_read_can_be_changed_without_changing_the_file(tmp_path):
    _, payload = written(tmp_path, {(0, 0): b"abcd"})
    PayloadReader(payload).get(0, 0)[:] = b"wxyz"
    assert bytes(PayloadReader(payload).get(0, 0)) == b"abcd"


def test_discard_leaves_nothing(tmp_path):
    writer = PayloadWriter(str(tmp_path / "run.payload"), 1 << 20)
    writer.add((0, 0), [("uint8", 3)], b"abc")
    assert len(os.listdir(tmp_path)) == 1
    writer.discard()
    writer.discard()
    assert os.listdir(tmp_path) == []


def test_discard_after_commit_keeps_the_file(tmp_path):
    writer, payload = written(tmp_path, {(0, 0): b"abc"})
    writer.discard()
    assert bytes(PayloadReader(payload).get(0, 0)) == b"abc"


def test_no_such_folder(tmp_path):
    with pytest.raises(PrismError, match=f"run.payload: cannot write here: {os.strerror(errno.ENOENT)}"):
        PayloadWriter(str(tmp_path / "none" / "run.payload"), 100)


def test_refusals(tmp_path):
    _, payload = written(tmp_path, {(0, 0): b"a" * 1000})
    _, other = written(tmp_path, {(0, 0): b"a" * 1000}, name="other.payload")
    data = (tmp_path / "run.payload").read_bytes()

    def refusal(content, description=payload):
        path = tmp_path / "bad.payload"
        path.write_bytes(content)
        with pytest.raises(PrismError) as caught:
            PayloadReader(replace(description, path=str(path)))
        return str(caught.value).removeprefix(f"{path}: ")

    assert refusal(b"") == "not a payload store of this version; record again"
    assert refusal(b"PRISMXX2" + data[8:]) == "not a payload store of this version; record again"
    assert refusal(data[:30]) == "not a payload store of this version; record again"
    assert refusal(data, other) == "belongs to another recording; record again"
    for length in (len(data) - 1, len(data) - 20, len(data) // 2, HEAD + FOOTER.size):
        assert refusal(data[:length]) == "truncated payload store; record again"
    with pytest.raises(PrismError, match="cannot read the recorded payloads"):
        PayloadReader(Payload(payload.uuid, str(tmp_path / "gone.payload"), "all", 0))


@pytest.mark.parametrize("content", [b"a" * 9000, bytes(range(250))])
def test_damage_is_found_where_it_is_read(content, tmp_path):
    """Compressed contents and others; the rest of the store can still be read."""
    _, payload = written(tmp_path, {(0, 0): content, (2, 7): content[1:], (2, 8): b"fine"})
    reader = PayloadReader(payload)
    with open(payload.path, "r+b") as file:
        place = int(reader.blobs["offset"][1]) + int(reader.blobs["stored"][1]) // 2
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 255]))
    for use in (lambda: reader.get(2, 7), lambda: reader.load([(2, 7)])):
        with pytest.raises(PrismError) as caught:
            use()
        problem = "rank 2 node 7: damaged payload (checksum differs); record again"
        assert str(caught.value) == f"{payload.path}: {problem}"
    assert bytes(reader.get(0, 0)) == content and bytes(reader.get(2, 8)) == b"fine"


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(tmp_path):
    """Some bits of compressed contents may be either: those after their end, or the distance to one of two equal strings."""
    contents = {(0, 0): bytes(range(256)) * 20, (0, 1): b"some", (2, 0): b"", (2, 1): os.urandom(300)}
    writer, payload = written(tmp_path, contents, budget=500)
    assert writer.summarised == [(2, 1)]
    summaries = PayloadReader(payload).summaries.tobytes()
    image = (tmp_path / "run.payload").read_bytes()
    unseen = []
    with open(payload.path, "r+b") as file:
        for place, bit in ((place, bit) for place in range(len(image)) for bit in range(8)):
            os.pwrite(file.fileno(), bytes([image[place] ^ 1 << bit]), place)
            try:
                reader = PayloadReader(payload)
                found = {where: reader.get(*where) for where in contents}
            except PrismError:
                pass
            else:
                unseen.append(place)
                kept = {where: None if data is None else bytes(data) for where, data in found.items()}
                assert kept == contents | {(2, 1): None} and reader.summaries.tobytes() == summaries, (place, bit)
            os.pwrite(file.fileno(), image[place : place + 1], place)
    blob = PayloadReader(payload).blobs[0]
    assert int(blob["codec"]) > 0 and all(HEAD <= place < HEAD + int(blob["stored"]) for place in unseen)


def test_damaged_tables_are_refused(tmp_path):
    _, payload = written(tmp_path, {(0, 0): b"a" * 1000})
    with open(payload.path, "r+b") as file:
        file.seek(payload.bytes + 8)
        file.write((10**9).to_bytes(8, "little"))  # the length of the only content
    with pytest.raises(PrismError, match="damaged payload store"):
        PayloadReader(payload)


def test_a_moved_store_is_found_by_its_uuid(tmp_path):
    """At its path relative to the graph, else beside the graph; a store of another recording there is passed over."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    _, payload = written(home, {(0, 0): b"right"})
    written(away, {(0, 0): b"wrong"})
    assert bytes(PayloadReader(replace(payload, path="../home/run.payload"), str(away)).get(0, 0)) == b"right"
    os.replace(home / "run.payload", away / "run.payload")
    written(home, {(0, 0): b"wrong"})
    for path in ("run.payload", "../home/run.payload", payload.path):
        assert bytes(PayloadReader(replace(payload, path=path), str(away)).get(0, 0)) == b"right"
    os.unlink(away / "run.payload")
    with pytest.raises(PrismError, match="belongs to another recording"):
        PayloadReader(payload, str(away))


def test_what_a_killed_writer_left_goes_and_a_living_ones_stays(tmp_path):
    code = (
        "import sys; from prism_tools.tensors.payload import PayloadWriter\n"
        "w = PayloadWriter(sys.argv[1], 1 << 20); print('ready', flush=True); input()"
    )
    path = str(tmp_path / "run.payload")
    call = [sys.executable, "-c", code, path]
    child = subprocess.Popen(call, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    (theirs,) = os.listdir(tmp_path)
    PayloadWriter(path, 100).discard()
    assert os.listdir(tmp_path) == [theirs]
    child.kill()
    assert child.wait() == -signal.SIGKILL
    other = tmp_path / ".run2.payload.prism-12345678.tmp"
    other.write_text("of another output")
    PayloadWriter(path, 100).discard()
    assert os.listdir(tmp_path) == [other.name]


def test_a_store_whose_writer_was_killed_before_it_was_committed(tmp_path):
    """The graph may have been renamed already, or not: both find their stores until the next one takes their place."""
    _, old = written(tmp_path, {(0, 0): b"old"})
    code = (
        "import sys, os, signal; from prism_tools.tensors.payload import PayloadWriter\n"
        "w = PayloadWriter(sys.argv[1], 1 << 20); w.add((0, 0), [('uint8', 3)], b'new'); print(w.finish().uuid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    call = [sys.executable, "-c", code, old.path]
    uuid = subprocess.run(call, env=environment(), stdout=subprocess.PIPE, text=True).stdout.strip()
    new = replace(old, uuid=uuid, path="run.payload")
    PayloadWriter(old.path, 100).discard()  # a recording that fails takes neither away
    assert bytes(PayloadReader(old).get(0, 0)) == b"old"
    assert bytes(PayloadReader(new, str(tmp_path)).get(0, 0)) == b"new"
    written(tmp_path, {})
    assert os.listdir(tmp_path) == ["run.payload"]


def test_a_folder_in_the_way(tmp_path):
    (tmp_path / "run.payload").mkdir()
    with pytest.raises(PrismError, match="run.payload: is a folder; payloads are kept in a file of this name"):
        PayloadWriter(str(tmp_path / "run.payload"), 100)
