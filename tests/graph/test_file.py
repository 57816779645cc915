"""Files: what goes in comes out, the same bytes every time, and everything else is refused in one line."""

import io
import os
import random
import stat
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.file import read, write
from prism_tools.graph.model import Ragged
from tests.graph.builder import add_results, build, comm, compute, differences, step, train4


@pytest.fixture
def full():
    graph = train4()
    add_results(graph)
    return graph


def refusal(path, **options) -> str:
    """The one line with which ``path`` is refused."""
    with pytest.raises(PrismError) as caught:
        read(path, **options)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "; " in line and "\n" not in line
    return line


def test_every_part_comes_back(full, tmp_path):
    write(full, tmp_path / "g.h5")
    assert differences(full, read(tmp_path / "g.h5")) == []


def test_bare_graph_comes_back_without_optional_parts(tmp_path):
    graph = train4()
    write(graph, tmp_path / "g.h5")
    back = read(tmp_path / "g.h5")
    assert differences(graph, back) == []
    assert (back.timing, back.durations, back.timeline, back.replay) == (None, None, None, None)


def test_smallest_graph_and_odd_text_come_back(tmp_path):
    graph = build(1, {}, lambda rank: [])
    graph.launch.cwd = "/h\xf6me/\udcff"  # a folder whose name is no UTF-8
    graph.launch.argv = ["", "a\nb", "\udcfe"]
    graph.strings = ["", "日本.py:1 f"]
    write(graph, tmp_path / "g.h5")
    assert differences(graph, read(tmp_path / "g.h5")) == []


def test_values_of_several_classes_keep_their_own_splits(tmp_path):
    graph = train4()
    assert len(graph.programs) == 1 and len(graph.values) == 2
    write(graph, tmp_path / "g.h5")
    back = read(tmp_path / "g.h5")
    assert [back.values_of(rank).splits[6].tolist() for rank in (0, 1)] == [[32, 64, 32, 64], [64, 32, 64, 32]]
    assert back.values_of(1).splits[5].tolist() == []


def test_programs_of_different_lengths_keep_their_edges(tmp_path):
    def nodes(rank):
        return [compute()] * (rank + 1) + [comm("send", "w", 4, peer=1 - rank, is_async=True), compute()]

    graph = build(2, {"w": [0, 1]}, nodes)
    write(graph, tmp_path / "g.h5")
    back = read(tmp_path / "g.h5")
    assert [program.edges.tolist() for program in back.programs] == [[[0, 1]], [[1, 2]]]


def test_same_graph_gives_same_bytes_at_any_time(full, tmp_path):
    write(full, tmp_path / "a.h5")
    time.sleep(1.01)  # a time stamp in the file would count seconds
    write(full, tmp_path / "b.h5")
    write(read(tmp_path / "a.h5"), tmp_path / "c.h5")
    first = (tmp_path / "a.h5").read_bytes()
    assert first == (tmp_path / "b.h5").read_bytes() == (tmp_path / "c.h5").read_bytes()


def test_environment_order_does_not_change_bytes(tmp_path):
    for name, env in (("a.h5", {"A": "1", "B": "2"}), ("b.h5", {"B": "2", "A": "1"})):
        graph = train4()
        graph.launch.env = env
        write(graph, tmp_path / name)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_large_arrays_are_compressed(tmp_path):
    graph = build(1, {}, lambda rank: [compute(), step()] * 2000)
    write(graph, tmp_path / "g.h5")
    with h5py.File(tmp_path / "g.h5") as file:
        kind = file["programs/segment"]
        assert (kind.compression, kind.shuffle, kind.shape) == ("gzip", True, (4000,))
        assert file["lanes/offset"].compression is None
    assert read(tmp_path / "g.h5").iterations() == 2000


def test_complete_and_version_are_attributes_of_the_root(full, tmp_path):
    write(full, tmp_path / "g.h5")
    with h5py.File(tmp_path / "g.h5") as file:
        assert dict(file.attrs) == {
            "format": b"prismtrace",
            "version": 1,
            "stage": b"replayed",
            "world_size": 4,
            "complete": True,
        }


def test_unknown_groups_are_carried_unchanged(full, tmp_path):
    write(full, tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        group = file.create_group("power")
        group.attrs["unit"] = "W"
        group.create_dataset("watts", data=np.arange(10000.0), compression="lzf", chunks=(1000,))
        group.create_dataset("names", data=["a", "bb"], dtype=h5py.string_dtype())
        group.create_dataset("pairs", data=np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]))
        file["loose"] = 7
    graph = read(tmp_path / "a.h5")
    assert sorted(graph.unknown) == ["loose", "power"]
    write(graph, tmp_path / "b.h5")
    write(read(tmp_path / "b.h5"), tmp_path / "c.h5")
    assert (tmp_path / "b.h5").read_bytes() == (tmp_path / "c.h5").read_bytes()
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["power"].attrs["unit"] == "W" and file["loose"][()] == 7
        assert file["power/watts"].compression == "lzf" and file["power/watts"][9999] == 9999.0
        assert file["power/names"].asstr()[:].tolist() == ["a", "bb"]
        assert file["power/pairs"][0].tolist() == (1, 2.5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_other_than_the_caller_is_noted_and_kept(tmp_path):
    write(train4(), tmp_path / "a.h5")
    assert read(tmp_path / "a.h5").launch.foreign_owner == -1
    os.chown(tmp_path / "a.h5", 12345, -1)
    graph = read(tmp_path / "a.h5")
    assert graph.launch.foreign_owner == 12345
    write(graph, tmp_path / "b.h5")
    os.chown(tmp_path / "b.h5", 54321, -1)
    assert read(tmp_path / "b.h5").launch.foreign_owner == 12345


def test_missing_file_and_folder_are_refused(tmp_path):
    assert "No such file or directory; check the name" in refusal(str(tmp_path / "none.h5"))
    assert "Is a directory; name a file in it" in refusal(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user to be")
def test_unreadable_file_is_refused(tmp_path):
    write(train4(), tmp_path / "g.h5")
    (tmp_path / "g.h5").chmod(0)
    child = os.fork()
    if child == 0:  # root reads everything: be nobody for a moment
        os.setuid(65534)
        try:
            read(str(tmp_path / "g.h5"))
        except PrismError as error:
            os._exit(0 if "Permission denied" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_empty_garbage_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "g.h5"
    path.touch()
    assert "is empty" in refusal(path)
    path.write_bytes(b"#!/bin/sh\n" * 100)
    assert "is not an HDF5 file" in refusal(path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\xff" * 5000)
    assert "is damaged" in refusal(path)
    with h5py.File(path, "w") as file:
        file["data"] = 1
    assert "of another program" in refusal(path)


def test_newer_version_is_refused(tmp_path):
    path = tmp_path / "g.h5"
    write(train4(), path)
    with h5py.File(path, "a") as file:
        file.attrs["version"] = 2
    assert "has format version 2, these tools read up to 1" in refusal(path)


def test_incomplete_file_is_refused_unless_partial(tmp_path):
    graph = train4()
    graph.complete = False
    write(graph, tmp_path / "g.h5")
    assert "is incomplete" in refusal(tmp_path / "g.h5")
    assert differences(read(tmp_path / "g.h5", partial=True), graph) == []
    with h5py.File(tmp_path / "g.h5", "a") as file:
        del file.attrs["complete"]
    assert "is incomplete" in refusal(tmp_path / "g.h5")
    assert read(tmp_path / "g.h5", partial=True).complete is False


def test_truncated_file_is_refused_at_every_length(full, tmp_path):
    write(full, tmp_path / "whole.h5")
    whole = (tmp_path / "whole.h5").read_bytes()
    for length in [8, 9, 95, 96, 97, 500, 2048, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "g.h5").write_bytes(whole[:length])
        line = refusal(tmp_path / "g.h5")
        assert length < 96 or "is truncated" in line


def test_damage_anywhere_never_shows_a_traceback(full, tmp_path):
    write(full, tmp_path / "whole.h5")
    whole = (tmp_path / "whole.h5").read_bytes()
    dice = random.Random(5)
    refused = 0
    for _ in range(60):
        image = bytearray(whole)
        for _ in range(20):
            image[dice.randrange(len(image))] ^= 1 << dice.randrange(8)
        (tmp_path / "g.h5").write_bytes(image)
        try:
            read(tmp_path / "g.h5")
        except PrismError:
            refused += 1
    assert refused > 40


def flipped(image, place, bit, path):
    """The graph read from a file with one bit turned over; None if it is refused."""
    path.write_bytes(image[:place] + bytes([image[place] ^ 1 << bit]) + image[place + 1 :])
    try:
        return read(path)
    except PrismError as error:
        assert "is damaged" in str(error) or "damaged graph" in str(error)
        return None


def places_of_data(path):
    """Of each array in a file that has any bytes: the first, the middle or the last place of each of its chunks."""
    places = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset) and item.size:
            chunks = [item.id.get_chunk_info(k) for k in range(item.id.get_num_chunks())]
            places[name] = [c.byte_offset + (0, c.size // 2, c.size - 1)[len(places) % 3] for c in chunks]

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return places


def test_a_flipped_bit_of_any_array_is_found(full, tmp_path):
    """Compressed and others; the smallest of them, on which all else hangs, have no redundancy of their own."""
    full.strings = ["", *(f"train.py:{line} step" for line in range(400))]
    write(full, tmp_path / "whole.h5")
    image = (tmp_path / "whole.h5").read_bytes()
    places = places_of_data(tmp_path / "whole.h5")
    assert len(places) > 60 and {"values/bytes", "programs/peer", "strings/utf8", "groups/members/data"} <= set(places)
    for name, found in places.items():
        for place in found:
            assert flipped(image, place, len(name) % 8, tmp_path / "g.h5") is None, f"{name}: {place}"


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(full, tmp_path):
    write(full, tmp_path / "whole.h5")
    image = (tmp_path / "whole.h5").read_bytes()
    dice = random.Random(7)
    for place in dice.sample(range(len(image)), 120):
        back = flipped(image, place, dice.randrange(8), tmp_path / "g.h5")
        assert back is None or differences(full, back) == [], place


def test_group_inside_itself_is_refused(tmp_path):
    write(train4(), tmp_path / "g.h5")
    with h5py.File(tmp_path / "g.h5", "a") as file:
        file["launch/again"] = file["launch"]
    assert "nested too deeply" in refusal(tmp_path / "g.h5")


def test_graph_that_does_not_hold_together_is_not_written(tmp_path):
    graph = train4()
    graph.values[0].splits = Ragged.from_rows([[1]], np.int64)
    with pytest.raises(PrismError, match="not written.*values 0"):
        write(graph, tmp_path / "g.h5")
    assert os.listdir(tmp_path) == []


def test_written_file_has_the_usual_mode_and_keeps_an_old_one(tmp_path):
    old = os.umask(0o027)
    try:
        write(train4(), tmp_path / "g.h5")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "g.h5").stat().st_mode) == 0o640
    (tmp_path / "g.h5").chmod(0o604)
    write(train4(), tmp_path / "g.h5")
    assert stat.S_IMODE((tmp_path / "g.h5").stat().st_mode) == 0o604


def test_link_is_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.h5").symlink_to(tmp_path / "real" / "g.h5")
    write(train4(), tmp_path / "link.h5")
    assert (tmp_path / "link.h5").is_symlink() and read(tmp_path / "real" / "g.h5").world_size == 4


def test_long_and_odd_names_are_written(tmp_path):
    for name in ("ä" * 120 + ".h5", " 'x;$(y)\n.h5", "\udcff.h5"):
        write(train4(), tmp_path / name)
        assert read(tmp_path / name).world_size == 4


def test_writing_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(train4(), "g.h5")
    assert os.listdir() == ["g.h5"] and read(Path("g.h5")).world_size == 4


def test_h5py_itself_reads_what_we_write(full):
    buffer = io.BytesIO()
    from prism_tools.graph.file import _fill
    from prism_tools.graph.tree import to_tree

    with h5py.File(buffer, "w") as file:
        _fill(file, to_tree(full))
        assert file["groups/members/data"][:].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 2, 1, 3]
        assert file["launch/entropy"][3] == 2**63 + 3
        assert bytes(file["lanes/utf8"][:]) == b"hostgloo"
