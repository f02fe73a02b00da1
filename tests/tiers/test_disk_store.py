"""Blocks in files: whole or a miss, the user's own, bounded, and there after a restart."""

import errno
import mmap
import os
import secrets
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quire.errors import InvalidParameter
from quire.tiers.checksum import content_sum
from quire.tiers.disk_store import HEAD_BYTES, DiskStore
from quire.tiers.mac_key import read_mac_key

ROOT, SIZE = "ab" * 20, 16384


def key(number, group=0):
    return bytes([number]) * 32, group


def content(number, size=SIZE):
    return np.full(size, number, dtype=np.uint8)


class Store(DiskStore):
    """A store that makes the checksums, and the room for what is read."""

    def put(self, key, content, *given):
        return super().put(key, content, content_sum(content), *given)

    def get(self, key, size=SIZE):
        into = np.empty(size, dtype=np.uint8)
        checksum = super().get(key, into)
        assert checksum is None or checksum == content_sum(into)
        return None if checksum is None else int(np.unique(into).item())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def store(folder):
    return Store(folder, ROOT, 1 << 20)


def files(folder):
    return sorted(folder.rglob("*.kv"))


def test_contents_survive_the_process(store, folder):
    store.put(key(1), content(1))
    store.put(key(1, group=2), content(2))
    again = Store(folder, ROOT, 1 << 20)
    assert sorted(again.contents()) == [key(1), key(1, group=2)]
    assert again.get(key(1)) == 1 and again.get(key(1, 2)) == 2
    assert again.get(key(3)) is None and not again.has(key(3))


@pytest.mark.parametrize("refuses", [False, True], ids=["direct", "refused"])
def test_whole_pages_are_written_without_a_copy(store, refuses, monkeypatch):
    real, flags = os.open, []

    def opened(path, how, *given):
        flags.append(how)
        if refuses and how & os.O_DIRECT:
            os.close(real(path, how & ~os.O_DIRECT, *given))  # Linux has made the file by then
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(path, how, *given)

    monkeypatch.setattr(os, "open", opened)
    page = np.frombuffer(mmap.mmap(-1, SIZE), dtype=np.uint8)
    page[:] = 7
    store.put(key(1), page)
    assert bool(flags[0] & os.O_DIRECT) and len(flags) == 1 + refuses
    assert store.get(key(1)) == 7


def test_another_root_has_other_contents(store, folder):
    store.put(key(1), content(1))
    other = Store(folder, "cd" * 20, 1 << 20)
    assert not other.contents() and other.get(key(1)) is None
    assert other.num_bytes == store.num_bytes, "the bound is for all of them"


@pytest.mark.parametrize(
    "damage",
    ["flip", "head", "sum", "seal", "padding", "last", "cut", "longer", "empty", "other size"],
)
def test_a_damaged_file_is_a_miss_and_goes(store, folder, damage):
    store.put(key(1), content(1))
    [file] = files(folder)
    data = bytearray(file.read_bytes())
    places = {
        "flip": len(data) // 2,
        "head": 3,
        "sum": 70,
        "seal": 90,
        "padding": HEAD_BYTES - 1,
        "last": -1,
    }
    if damage in places:
        data[places[damage]] ^= 1
    data = {"cut": data[:-40], "longer": data + b"x", "empty": b""}.get(damage, data)
    file.write_bytes(data)
    with pytest.raises(OSError, match="damaged"):
        store.get(key(1), SIZE + 64 * (damage == "other size"))
    assert not file.exists() and not store.has(key(1))


def test_a_file_under_another_ones_name_is_a_miss(store, folder):
    store.put(key(1), content(1))
    store.put(key(2), content(2))
    first, second = files(folder)
    os.replace(first, second)
    with pytest.raises(OSError, match="damaged"):
        store.get(key(2))


def test_files_are_the_users_own(store, folder):
    store.put(key(1), content(1))
    [file] = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, *file.parents[:2])} == {0o700}


def test_a_folder_that_others_write_to_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(InvalidParameter, match="no one else can write"):
        Store(folder, ROOT, 1 << 20)
    (folder.parent / "file").write_text("")
    with pytest.raises(InvalidParameter, match="a folder"):
        Store(folder.parent / "file", ROOT, 1 << 20)


def test_the_least_recently_used_makes_room(folder):
    store = Store(folder, ROOT, 4 * SIZE)
    for number in (1, 2, 3):
        assert store.put(key(number), content(number)) == []
    store.get(key(1), SIZE)
    assert store.put(key(4), content(4)) == [key(2)]
    assert store.num_bytes <= 4 * SIZE and len(files(folder)) == 3
    assert store.get(key(1)) == 1 and not store.has(key(2))


def test_use_is_remembered_by_the_files(folder):
    store = Store(folder, ROOT, 1 << 20)
    for number in (1, 2, 3):
        store.put(key(number), content(number))
        os.utime(folder / store._path(key(number)), (number, number))
    store.get(key(1), SIZE)
    assert Store(folder, ROOT, 1 << 20).contents() == [key(2), key(3), key(1)]


def test_others_that_write_count(folder):
    one, two = (Store(folder, ROOT, 40 * SIZE) for _ in range(2))
    for number in range(35):
        one.put(key(number), content(number))
    for number in range(100, 130):
        two.put(key(number), content(number))
    assert sum(file.stat().st_size for file in files(folder)) <= 44 * SIZE


def test_a_full_disk_leaves_nothing(store, folder, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        store.put(key(1), content(1))
    assert not store.has(key(1)) and not [f for f in folder.rglob("*") if f.is_file()]


def test_abandoned_half_written_files_go(store, folder):
    left, under_way = (store.folder / f"{name}.part" for name in ("0a", "0b"))
    for file in (left, under_way):
        file.write_text("half")
    os.utime(left, (1, 1))
    Store(folder, ROOT, 1 << 20)
    assert not left.exists() and under_way.exists()


def test_a_half_written_file_of_another_engine_stays(store, folder, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00")
    other = store.folder / "00.part"
    other.write_text("half")
    with pytest.raises(FileExistsError):
        store.put(key(1), content(1))
    assert other.read_text() == "half"


def test_a_content_above_the_bound_is_not_written(folder):
    store = Store(folder, ROOT, 2 * SIZE)
    store.put(key(1), content(1))
    assert store.put(key(2), content(0, 2 * SIZE)) == [] and not store.has(key(2))
    assert store.get(key(1)) == 1, "nothing had to make room"


def test_links_are_not_followed(store, folder):
    store.put(key(1), content(1))
    [file] = files(folder)
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        store.get(key(1))
    assert not Store(folder, ROOT, 1 << 20).contents()


def test_a_disk_that_hangs_holds_no_lock(folder, monkeypatch):
    store = Store(folder, ROOT, 2 * SIZE)
    store.put(key(1), content(1))
    hangs, goes_on, real = threading.Event(), threading.Event(), Path.unlink

    def unlink(path, **options):
        hangs.set()
        assert goes_on.wait(60)
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    with ThreadPoolExecutor() as threads:
        written = threads.submit(store.put, key(2), content(2))
        assert hangs.wait(60)
        try:
            assert threads.submit(store.has, key(1)).result(60) is False
        finally:
            goes_on.set()
        assert written.result() == [key(1)]


def test_what_changes_while_the_folder_is_read_counts(folder, monkeypatch):
    store = Store(folder, ROOT, 1 << 20)
    for number in (1, 2):
        store.put(key(number), content(number))
    real = os.walk

    def walk(top):
        found = list(real(top))
        store.put(key(3), content(3))
        store._delete(store._path(key(1)))
        return found

    monkeypatch.setattr(os, "walk", walk)
    store._look()
    assert store.contents() == [key(2), key(3)]
    assert store.num_bytes == sum(file.stat().st_size for file in files(folder))


def test_clearing_leaves_other_roots(store, folder):
    store.put(key(1), content(1))
    other = Store(folder, "cd" * 20, 1 << 20)
    other.put(key(1), content(2))
    store.clear()
    assert not store.contents() and other.get(key(1)) == 2


def test_what_is_forgotten_while_it_is_written_gets_no_name(store, folder):
    store.put(key(1), content(1))

    def forgotten():
        return False

    assert store.put(key(2), content(2), forgotten) == []
    store.clear()
    assert not store.has(key(2)) and not [file for file in folder.rglob("*") if file.is_file()]


KEY = bytes(range(64))


def test_a_folder_of_others_is_used_with_a_key(folder):
    folder.mkdir()
    folder.chmod(0o777)
    store = Store(folder, ROOT, 1 << 20, KEY)
    store.put(key(1), content(1))
    again = Store(folder, ROOT, 1 << 20, KEY)
    assert again.contents() == [key(1)] and again.get(key(1)) == 1


OTHER_STORES = {
    "content and checksum": (ROOT, None),
    "another key": (ROOT, bytes(64)),
    "another root": ("cd" * 20, KEY),
}


def forge(folder, kind, store):
    """Write a file as somebody without the key can."""
    [file] = files(folder)
    data = bytearray(file.read_bytes())
    if kind == "content":
        data[HEAD_BYTES:] = content(2).tobytes()
    elif kind == "another block":
        store.put(key(2), content(2))
        data = (folder / store._path(key(2))).read_bytes()
    else:
        root, known = OTHER_STORES[kind]
        other = DiskStore(folder / "forged", root, 1 << 20, known)
        other.put(key(1), content(2), content_sum(content(2)))
        data = files(folder / "forged")[0].read_bytes()
    (folder / store._path(key(1))).write_bytes(data)


@pytest.mark.parametrize("kind", ["content", "another block", *OTHER_STORES])
def test_a_block_that_others_have_written_is_not_an_answer(kind, folder):
    store = Store(folder, ROOT, 1 << 20, KEY)
    store.put(key(1), content(1))
    forge(folder, kind, store)
    with pytest.raises(OSError, match="damaged"):
        store.get(key(1))
    assert not store.has(key(1))


def test_engines_with_and_without_a_key_have_folders_of_their_own(folder):
    for given in (None, KEY, bytes(64)):
        store = Store(folder, ROOT, 1 << 20, given)
        assert not store.contents() and not store.has(key(1))
        store.put(key(1), content(1))
    assert len(files(folder)) == 3


def test_a_key_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "key"
    for text, mode, says in (("ab" * 32, 0o644, "no one else"), ("ab", 0o600, "32 to")):
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(InvalidParameter, match=says):
            read_mac_key("mac_key_file", file)
    with pytest.raises(InvalidParameter, match="No such file"):
        read_mac_key("mac_key_file", tmp_path / "none")
    file.write_text("ab" * 32 + "\n")
    assert len(read_mac_key("mac_key_file", file)) == 64
