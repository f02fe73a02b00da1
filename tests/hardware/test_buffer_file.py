"""Files of buffers: what is written is mapped, what is damaged is found, nothing is left half."""

import os
import sys
import threading
import zlib
from pathlib import Path

import pytest

from quire.hardware import buffer_file
from quire.hardware.buffer_file import (
    BadFile,
    end_mapping_ahead,
    map_ahead,
    map_buffers,
    write_buffers,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without names")
BUFFERS = {"large": os.urandom(9 << 20), "empty": b"", "odd": b"abc", "page": bytes(4096)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    views = {name: memoryview(data) for name, data in BUFFERS.items()}
    assert write_buffers(path, views, {"a": [1, "b"]}, lambda: True)
    return path


def contents(path):
    pages, places, about = map_buffers(path)
    assert about == {"a": [1, "b"]}
    return {name: pages[at : at + nbytes] for name, (at, nbytes) in places.items()}


def test_what_is_written_is_mapped(file):
    assert contents(file) == BUFFERS
    _, places, _ = map_buffers(file)
    assert all(at % 4096 == 0 for at, _ in places.values())


def test_what_is_mapped_stays_when_the_file_goes(file):
    pages, places, _ = map_buffers(file)
    file.unlink()
    at, nbytes = places["large"]
    assert pages[at : at + nbytes] == BUFFERS["large"]


def test_writing_to_the_pages_does_not_change_the_file(file):
    pages, places, _ = map_buffers(file)
    pages[places["odd"][0]] = 0
    assert contents(file) == BUFFERS


def test_what_is_mapped_ahead_is_taken_once(file):
    map_ahead(file)
    ahead = buffer_file._ahead[file].pages
    taken, _, _ = map_buffers(file)
    assert taken is ahead
    assert map_buffers(file)[0] is not ahead
    map_ahead(file)
    end_mapping_ahead()
    assert not buffer_file._ahead


def test_a_file_that_changes_after_it_was_mapped_ahead_is_mapped_anew(file, tmp_path):
    """Whether another one has its name, or it was written to; and one that is gone is not found."""
    map_ahead(file)
    write_buffers(tmp_path / "other", {"b": memoryview(b"x")}, None, lambda: True)
    (tmp_path / "other").rename(file)
    assert list(map_buffers(file)[1]) == ["b"]
    map_ahead(file)
    with file.open("r+b") as place:
        place.seek(60)
        place.write(b"damage")
    with pytest.raises(BadFile):
        map_buffers(file)
    map_ahead(file)  # which does nothing with such a file
    with pytest.raises(BadFile):
        map_buffers(file)
    file.unlink()
    map_ahead(file)
    with pytest.raises(FileNotFoundError):
        map_buffers(file)


def test_a_thread_reads_what_is_mapped(file, monkeypatch):
    read = []
    monkeypatch.setattr(buffer_file, "_fault_in", lambda pages: read.append(len(pages)))
    map_ahead(file)
    for thread in threading.enumerate():
        if thread.name == "mapped-file":
            thread.join()
    assert read == [file.stat().st_size]


def test_who_stops_leaves_nothing(tmp_path):
    views = {"large": memoryview(BUFFERS["large"])}
    assert not write_buffers(tmp_path / "file", views, None, lambda: False)
    assert not list(tmp_path.iterdir())


def test_the_first_to_write_a_file_keeps_it(file):
    assert not write_buffers(file, {"other": memoryview(b"x")}, None, lambda: True)
    assert contents(file) == BUFFERS


@pytest.mark.parametrize("at", [0, 60, 200, 2 << 20, -1])
def test_after_another_boot_any_damage_is_found(file, monkeypatch, tmp_path, at):
    (tmp_path / "boot").write_text("00000000-0000-0000-0000-000000000000")
    monkeypatch.setattr(buffer_file, "_BOOT", tmp_path / "boot")
    assert contents(file) == BUFFERS, "checked, and of this boot now"
    monkeypatch.setattr(buffer_file, "_BOOT", Path("/proc/sys/kernel/random/boot_id"))
    data = bytearray(file.read_bytes())
    data[at - 4093 if at < 0 else at] ^= 255  # the end is a page of zeros that has a checksum
    file.write_bytes(data)
    with pytest.raises(BadFile):
        map_buffers(file)


def test_a_file_that_is_cut_off_while_it_is_read_ahead_ends_no_process(file):
    pages = map_buffers(file)[0]
    os.truncate(file, 4096)
    buffer_file._fault_in(pages)


@pytest.mark.parametrize("at", [60, 70, 2 << 20, -1])
def test_damage_within_one_boot_is_found(file, at):
    """A byte of the header's, which has no page of its own, would be another buffer's place."""
    data = bytearray(file.read_bytes())
    data[at - 4093 if at < 0 else at] ^= 255
    with file.open("r+b") as place:  # as a damaged or careless program would: the same file
        place.write(data)
    with pytest.raises(BadFile):
        map_buffers(file)


def test_a_file_that_nobody_has_changed_is_not_checked_again(file, monkeypatch):
    def check(*_):
        raise AssertionError("its checksums are computed")

    monkeypatch.setattr(buffer_file, "_check", check)
    used = file.stat().st_atime_ns
    buffer_file.mark_used(file)
    assert file.stat().st_atime_ns > used
    assert contents(file) == BUFFERS


def test_what_is_not_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="not a file"):
        map_buffers(tmp_path / "pipe")


@pytest.mark.parametrize("size", [0, 5, 44, 100, 5000, 1 << 20])
def test_a_file_that_is_cut_is_found(file, size):
    os.truncate(file, size)
    with pytest.raises(BadFile):
        map_buffers(file)


@pytest.mark.parametrize("header", ["[" * 10_000, "{}", "[]", '{"places": 1, "size": 0}', "\\"])
def test_a_header_that_is_none_is_found(tmp_path, header):
    text = header.encode()
    mark = buffer_file._boot() + bytes(8)
    length, checksum = len(text).to_bytes(8, "little"), zlib.crc32(text).to_bytes(4, "little")
    (tmp_path / "file").write_bytes(buffer_file.MAGIC + mark + length + checksum + text.ljust(4096))
    with pytest.raises(BadFile):
        map_buffers(tmp_path / "file")


@pytest.mark.skipif(os.cpu_count() is None, reason="looks into /proc")
def test_large_buffers_are_on_huge_pages_where_the_file_system_has_them(tmp_path):
    """Writing in whole huge pages is what lets ext4, xfs and others keep them as such."""
    path = tmp_path / "file"
    data = memoryview(bytes(32 << 20))
    steps = []
    real = os.pwrite

    def pwrite(file, part, at):
        steps.append((len(part), at))
        return real(file, part, at)

    buffer_file.os.pwrite, written = pwrite, None
    try:
        written = write_buffers(path, {"a": data, "b": data}, None, lambda: True)
    finally:
        buffer_file.os.pwrite = real
    assert written
    assert steps.pop() == (44, len(buffer_file.MAGIC)), "the mark"
    assert all(at % (2 << 20) == 0 for _, at in steps)
    assert all(length % (2 << 20) == 0 for length, _ in steps[:-1])
