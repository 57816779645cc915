"""The payload store: what is kept, what is stored once, and what is refused."""

import errno
import os
from dataclasses import replace

import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.model import Payload
from prism_tools.tensors.payload import FOOTER, MAGIC, PayloadReader, PayloadWriter

HEAD = len(MAGIC) + 16


def written(folder, contents, budget=1 << 20, name="run.payload"):
    """A committed store of {(rank, node): bytes}, and its description."""
    writer = PayloadWriter(str(folder / name), budget)
    for (rank, node), data in contents.items():
        writer.add(rank, node, memoryview(data))
    payload = writer.finish()
    writer.commit()
    return writer, payload


def test_contributions_come_back(tmp_path):
    contents = {(0, 1): b"abc", (7, 3): b"", (0, 5): bytes(range(256)) * 300}
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
    assert os.path.getsize(payload.path) == payload.bytes + 24 * 4 * 8 + FOOTER.size
    reader = PayloadReader(payload)
    assert {place: bytes(reader.get(*place)) for place in contents} == contents


def test_beyond_the_budget_nothing_new_is_kept(tmp_path):
    contents = {(0, 0): b"a" * 100, (0, 1): b"b" * 101, (0, 2): b"a" * 100, (0, 3): b"c" * 50}
    writer, payload = written(tmp_path, contents, budget=HEAD + 200)
    assert writer.lost == 101 and payload.mode == "partial"
    reader = PayloadReader(payload)
    assert reader.get(0, 1) is None
    assert bytes(reader.get(0, 2)) == b"a" * 100 and bytes(reader.get(0, 3)) == b"c" * 50


def test_essential_contributions_are_kept_whatever_the_budget(tmp_path):
    writer = PayloadWriter(str(tmp_path / "run.payload"), 0)
    writer.add(0, 0, b"a" * 100)
    writer.add(0, 1, b"b" * 100, essential=True)
    payload = writer.finish()
    writer.commit()
    assert writer.lost == 100 and payload.mode == "none"
    assert PayloadReader(payload).get(0, 0) is None and bytes(PayloadReader(payload).get(0, 1)) == b"b" * 100


def test_an_older_store_stays_until_the_new_one_is_committed(tmp_path):
    _, old = written(tmp_path, {(0, 0): b"old"})
    writer = PayloadWriter(old.path, 100)
    writer.add(0, 0, b"new")
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
    writer.add(0, 0, b"abc")
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

    assert refusal(b"") == "cannot read the recorded payloads; record again or restore the file"
    assert refusal(b"PRISMXX1" + data[8:]) == "not a payload store"
    assert refusal(data[:30]) == "not a payload store"
    assert refusal(data, other) == "belongs to another recording; record again"
    for length in (len(data) - 1, len(data) - 20, len(data) // 2, HEAD + FOOTER.size):
        assert refusal(data[:length]) == "truncated payload store; record again"
    with pytest.raises(PrismError, match="cannot read the recorded payloads"):
        PayloadReader(Payload(payload.uuid, str(tmp_path / "gone.payload"), "all", 0))


def test_an_index_that_points_outside_is_refused(tmp_path):
    _, payload = written(tmp_path, {(0, 0): b"a" * 1000})
    with open(payload.path, "r+b") as file:
        file.seek(payload.bytes + 24)
        file.write((10**9).to_bytes(8, "little"))  # the length of the only row
    with pytest.raises(PrismError, match="damaged payload store"):
        PayloadReader(payload)
