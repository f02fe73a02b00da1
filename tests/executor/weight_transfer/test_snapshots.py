"""What is removed of files that belong to processes: those that nobody holds, whatever numbers
processes have. Containers that share a folder do not see each other's.
"""

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch

from quire.distributed import shared_buffer
from quire.distributed.shared_buffer import SharedBuffer
from quire.engine.process.socket_folder import make_socket_folder, remove_socket_folder
from quire.executor.weight_transfer.snapshots import Snapshots
from quire.processes.held_files import hold, left_behind

NOBODY = 1 << 22
"""A number that no process has, as the numbers of other containers' processes have none here."""


def test_a_snapshot_is_removed_an_hour_after_nobody_holds_it(tmp_path):
    weights, found = [torch.arange(8.0)], [torch.zeros(8)]
    ours, now = "a" * 32, time.time()
    living = Snapshots(tmp_path, "0-0")
    living.keep(ours, weights)
    living.settle()
    other = Snapshots(tmp_path, "0-0", clock=lambda: now + 7200)
    for token in ("b" * 32, "c" * 32):  # the second looks at what the first has seen
        other.keep(token, weights)
        other.settle()
    assert len([*tmp_path.glob("*.weights")]) == 2
    os.close(living._held)  # its core dies
    other._remove_orphans()
    assert len([*tmp_path.glob("*.left")]) == 1
    heir = Snapshots(tmp_path, "0-0")
    assert heir.restore(ours, found) == "" and torch.equal(found[0], weights[0])
    for _ in range(2):
        other._remove_orphans()
    assert heir.restore(ours, found) == ""
    os.close(heir._held)
    for clock, is_there in ((time.time, True), (lambda: now + 7200, False)):
        late = Snapshots(tmp_path, "0-1", clock)
        for _ in range(2):
            late._remove_orphans()
        assert any(path.name.startswith(ours) for path in tmp_path.iterdir()) is is_there
    other.drop()
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def short_path():
    """A folder whose sockets have names that are short enough, wherever pytest's folders are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_sockets_are_removed_where_nobody_holds_their_folder(short_path, monkeypatch):
    tmp_path = short_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / f"quire-sockets-{NOBODY + i}-x" for i in range(2)]
    for folder in others:
        folder.mkdir(0o700)
        (folder / "input").touch()
    held = hold(others[0])
    own = make_socket_folder()
    try:
        assert {*tmp_path.iterdir()} == {others[0], own} and [*others[0].iterdir()]
        with left_behind(own) as is_left:
            assert not is_left
        os.close(held)
        with left_behind(others[0]) as is_left:
            assert is_left
    finally:
        remove_socket_folder(own)
    assert {*tmp_path.iterdir()} == {others[0]}


def test_memory_is_removed_where_no_trainer_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_buffer, "_FOLDER", tmp_path)
    first = SharedBuffer(64)
    left = tmp_path / ("quire-weights-" + "0" * 16)
    left.write_bytes(b"x")
    second = SharedBuffer(64)
    assert {*tmp_path.iterdir()} == {first._path, second._path}
    first.close()
    second.close()
    assert not [*tmp_path.iterdir()]
