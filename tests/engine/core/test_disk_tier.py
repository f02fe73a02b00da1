"""K/V in a folder: a server that is started again goes on with it, and whatever the disk does costs
time alone.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time

import numpy as np
import pytest

from quire.engine.control_verbs import perform
from quire.errors import InvalidParameter
from quire.executor.kv_tier import opening
from quire.executor.kv_tier.root import RootParts
from quire.testing import make_checkpoint
from quire.tiers.checksum import content_sum
from quire.tiers.disk_store import DiskStore
from tests.engine.core.kv_tier_scene import (
    PROMPT,
    Ask,
    check_restored,
    open_core,
    prompts,
    tier_of,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def opened(core):
    tier = next(feature for feature in core.features if hasattr(feature, "is_opening"))
    while tier.is_opening:
        core.executor.collective_rpc("wait_for_transfers", (0.1,), {})
        core.step()
    return core


def filled(model, folder, **options):
    core = opened(open_core(model, disk=folder, **options))
    ask = Ask(core)
    found = [ask(ids) for ids in prompts()]
    core.shutdown()
    return found


def test_a_server_that_is_started_again_is_warm(model, folder, expected):
    assert filled(model, folder) == expected
    ask = Ask(opened(open_core(model, disk=folder)))
    check_restored(ask, prompts(), expected)


def test_what_host_memory_has_no_room_for_comes_from_the_folder(model, folder, expected):
    ask = Ask(opened(open_core(model, host_bytes=1 << 13, disk=folder)))
    for _ in range(2):
        assert [ask(ids) for ids in prompts()] == expected
    tier = tier_of(ask.core)
    tier._writes.close(60)
    assert len(tier._host) < len(tier._disk.contents())
    assert ask.external_hits > PROMPT // 2


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_files_are_computed_again(damage, model, folder, expected):
    filled(model, folder)
    for file in folder.rglob("*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data if damage == "flipped" else data[: len(data) // 3])
    ask = Ask(opened(open_core(model, disk=folder)))
    if damage == "gone":
        for file in folder.rglob("*.kv"):
            file.unlink()
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    check_restored(ask, prompts(), expected)


def test_a_checksum_that_is_not_looked_at_is_noticed(model, folder, expected, monkeypatch):
    filled(model, folder)
    for file in folder.rglob("*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 64
        file.write_bytes(data)

    def trusting(self, key, into):
        data = (self._top / self._path(key)).read_bytes()
        into[:] = np.frombuffer(data[-into.nbytes :], dtype=np.uint8)
        return content_sum(into)

    monkeypatch.setattr(DiskStore, "get", trusting)
    ask = Ask(opened(open_core(model, disk=folder)))
    assert [ask(ids) for ids in prompts()] != expected


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"block_size": 8, "num_gpu_blocks_override": 8},
        {"hf_overrides": {"rope_theta": 20000.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_of_the_same_files_finds_nothing(change, model, folder):
    filled(model, folder)
    core = opened(open_core(model, disk=folder, **change))
    ask = Ask(core)
    assert not tier_of(core)._disk.contents()
    ask(prompts()[0])
    assert ask.external_hits == 0


def test_other_contents_of_the_same_files_find_nothing(model, folder, tmp_path):
    filled(model, folder)
    other = make_checkpoint(tmp_path / "other" / "llama", {"num_hidden_layers": 2}, "llama", seed=1)
    assert not tier_of(opened(open_core(other, disk=folder)))._disk.contents()
    same = make_checkpoint(tmp_path / "same" / "llama", {"num_hidden_layers": 2}, "llama")
    assert tier_of(opened(open_core(same, disk=folder)))._disk.contents(), "a copy of the files"


def test_a_full_disk_costs_its_files_alone(model, folder, expected, monkeypatch, caplog):
    def full(self, key, content, checksum, is_wanted):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskStore, "put", full)
    ask = Ask(opened(open_core(model, disk=folder)))
    assert [ask(ids) for ids in prompts()] == expected
    check_restored(ask, prompts(), expected)
    assert "No space left" in caplog.text
    assert caplog.text.count("cannot be written") <= 3


def test_a_clock_that_is_set_loses_nothing(model, folder, expected, monkeypatch):
    jumps, real = itertools.cycle([86_400.0, -86_400.0, 0.0]), time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert filled(model, folder) == expected
    ask = Ask(opened(open_core(model, disk=folder)))
    check_restored(ask, prompts(), expected)


class SlowDisk:
    """Reads do not end until it is told."""

    def __init__(self, monkeypatch):
        self.ends, self.begun, real = threading.Event(), threading.Event(), DiskStore.get

        def get(store, key, into):
            self.begun.set()
            assert self.ends.wait(60)
            return real(store, key, into)

        monkeypatch.setattr(DiskStore, "get", get)


def test_a_slow_disk_delays_nobody_else(model, folder, expected, monkeypatch):
    filled(model, folder)
    disk = SlowDisk(monkeypatch)
    ask = Ask(opened(open_core(model, disk=folder, num_gpu_blocks_override=24)))
    ask.add(77, prompts()[0])
    ask.core.step()
    ask.add(78, prompts(1, seed=9)[0][:20])
    found = []
    while len(found) < 6:
        found += ask.core.step().handles
    assert set(found) == {78}
    disk.ends.set()
    assert ask.run()[77] == expected[0] and ask.external_hits > 0


def test_a_reset_does_not_wait_for_a_slow_disk(model, folder, expected, monkeypatch):
    filled(model, folder)
    disk = SlowDisk(monkeypatch)
    ask = Ask(opened(open_core(model, disk=folder)))
    ask.add(77, prompts()[0])
    ask.core.step()
    assert disk.begun.wait(9)
    assert perform(ask.core, "reset_prefix_cache", (True,)) is True
    disk.ends.set()
    assert ask.run()[77] == expected[0]
    for ids, answer in zip(prompts(), expected, strict=True):
        assert ask(ids) == answer


def test_a_disk_that_hangs_is_given_up(model, folder, expected, monkeypatch):
    filled(model, folder)
    disk = SlowDisk(monkeypatch)
    ask = Ask(opened(open_core(model, disk=folder)))
    tier, now = tier_of(ask.core), [1000.0]
    tier._clock = lambda: now[0]
    ask.add(77, prompts()[0])
    ask.core.step()
    assert disk.begun.wait(9)
    now[0] += 6
    assert ask.run()[77] == expected[0] and ask.external_hits == 0
    assert [ask(ids) for ids in prompts()[1:]] == expected[1:], "it is not asked again"
    disk.ends.set()


def test_a_reset_of_the_connector_deletes_the_files(model, folder):
    core = opened(open_core(model, disk=folder))
    ask = Ask(core)
    [ask(ids) for ids in prompts()]
    assert perform(core, "reset_prefix_cache", (False, True)) is True
    core.shutdown()
    assert not list(folder.rglob("*.kv"))


def test_a_function_that_may_change_weights_leaves_the_files_to_others(model, folder, expected):
    filled(model, folder)
    before = sorted(folder.rglob("*.kv"))
    ask = Ask(opened(open_core(model, disk=folder)))
    perform(ask.core, "collective_rpc", (lambda worker: None,))
    assert [ask(ids) for ids in prompts(seed=5)] and ask.external_hits == 0
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    ask.core.shutdown()
    assert sorted(folder.rglob("*.kv")) == before


def test_a_read_that_ends_after_the_weights_changed_is_not_kept(model, folder, monkeypatch):
    filled(model, folder)
    disk = SlowDisk(monkeypatch)
    ask = Ask(opened(open_core(model, disk=folder)))
    ask.add(77, prompts()[0])
    ask.core.step()
    assert disk.begun.wait(9)
    perform(ask.core, "collective_rpc", (lambda worker: None,))
    disk.ends.set()
    tier = tier_of(ask.core)
    tier._reads.close(60)
    tier.settle()
    assert not len(tier._host)


def test_a_reset_after_the_weights_may_have_changed_empties_host_memory(model, folder):
    ask = Ask(opened(open_core(model, disk=folder)))
    perform(ask.core, "collective_rpc", (lambda worker: None,))
    ask(prompts()[0])
    assert len(tier_of(ask.core)._host)
    assert perform(ask.core, "reset_prefix_cache", (False,)) is True
    assert not len(tier_of(ask.core)._host)
    ask(prompts()[0])
    assert ask.external_hits == 0


def test_a_reset_while_the_folder_is_opened_deletes_its_files(model, folder, monkeypatch):
    filled(model, folder)
    goes_on, real = threading.Event(), opening._open_disk

    def slow(plan, parts):
        assert goes_on.wait(60)
        return real(plan, parts)

    monkeypatch.setattr(opening, "_open_disk", slow)
    monkeypatch.setattr(RootParts, "is_kept", lambda self, kept: False)
    core = open_core(model, disk=folder)
    assert perform(core, "reset_prefix_cache", (False, True)) is True
    goes_on.set()
    disk = tier_of(opened(core))._disk
    assert disk is not None and not disk.contents() and not list(folder.rglob("*.kv"))
    Ask(core)(prompts()[0])
    core.shutdown()
    assert list(folder.rglob("*.kv")), "the folder is used from now on"


def test_a_folder_of_others_is_not_used(model, folder, expected, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    ask = Ask(opened(open_core(model, disk=folder)))
    assert [ask(ids) for ids in prompts()] == expected
    assert tier_of(ask.core)._disk is None and InvalidParameter.__name__ in caplog.text
