"""Rows of encoders in a tier: made once, and the same bits from host memory, files and after a
start.
"""

import pytest
import torch

from quire.executor.kv_tier.tiered_encoder import TieredEncoder
from quire.runner.block_transfers import BlockTransfers
from quire.tiers.disk_store import DiskStore
from quire.tiers.plan import DiskTierPlan
from quire.tiers.slot_table import SlotTable
from tests.runner.test_connected_encoder import WIDTH, Counting, equal, item

SLOT = 128
"""Bytes, so that most items have several pieces."""


class Scene:
    """An encoder that counts, over a tier of a few slots."""

    def __init__(self, folder=None, num_slots=16):
        table = SlotTable(SLOT, num_slots)
        memory = torch.frombuffer(table.memory, dtype=torch.uint8)
        slots = [memory[table.start_of(i) :][:SLOT] for i in range(num_slots)]
        plan = None if folder is None else DiskTierPlan(str(folder), 1 << 20, 1, 1)
        self.tier = BlockTransfers(None, slots, table, [SLOT], plan)
        if folder is not None:
            self.tier.open(lambda: DiskStore(folder, "ab" * 20, 1 << 20), now=True)
        self.counting = Counting()
        like = torch.empty(WIDTH, dtype=torch.bfloat16)
        self.encoder = TieredEncoder(self.counting, like)
        self.encoder.bind(self.tier)
        self.tier.settle()

    def __call__(self, *items):
        found = self.encoder.encode(items)
        self.tier.settle()
        return found

    def close(self):
        self.tier.close()


@pytest.fixture
def scene():
    made = []

    def make(*args, **options):
        made.append(Scene(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


ITEMS = [item(1), item(2, 5), item(3, 16)]


def test_rows_are_made_once(scene):
    stage, right = scene(), Counting().encode(ITEMS)
    assert equal(stage(*ITEMS), right) and len(stage.counting.ran) == 3
    assert equal(stage(*ITEMS), right) and len(stage.counting.ran) == 3
    assert stage.encoder.num_loaded == 3
    assert equal(stage(item(4), ITEMS[1]), [*Counting().encode([item(4)]), right[1]])
    assert stage.counting.ran[3:] == [item(4).digest]


def test_rows_of_another_number_or_modality_are_others(scene):
    stage = scene()
    stage(item(1))
    stage(item(1, num_rows=4))
    assert len(stage.counting.ran) == 2


def test_a_tier_that_always_misses_is_noticed(scene, monkeypatch):
    stage = scene()
    stage(*ITEMS)
    monkeypatch.setattr(BlockTransfers, "get", lambda *_: False)
    assert equal(stage(*ITEMS), Counting().encode(ITEMS)) and len(stage.counting.ran) == 6


def test_the_least_recently_used_makes_room(scene):
    stage = scene(num_slots=3)
    stage(*ITEMS)
    assert equal(stage(ITEMS[0]), Counting().encode(ITEMS[:1])) and len(stage.counting.ran) == 4
    assert equal(stage(ITEMS[0]), Counting().encode(ITEMS[:1])) and len(stage.counting.ran) == 4


def test_damage_in_host_memory_is_a_miss(scene):
    stage = scene()
    stage(ITEMS[2])
    for content in list(stage.tier._host._by_key.values()):
        content.slot[5] ^= 1
    assert equal(stage(ITEMS[2]), Counting().encode(ITEMS[2:])) and len(stage.counting.ran) == 2


@pytest.mark.parametrize("damage", ["none", "flipped", "gone"])
def test_rows_come_back_from_files_after_a_start(scene, damage, tmp_path):
    first = scene(tmp_path / "kv")
    right = first(*ITEMS)
    first.tier._writes.close(10)
    files = sorted((tmp_path / "kv").rglob("*.kv"))
    assert len(files) == 1 + 1 + 2
    second = scene(tmp_path / "kv")
    for file in files:
        if damage == "flipped":
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        elif damage == "gone":
            file.unlink()
    assert equal(second(*ITEMS), right)
    assert len(second.counting.ran) == (0 if damage == "none" else 3)
    made = len(second.counting.ran)
    assert equal(second(*ITEMS), right) and len(second.counting.ran) == made, "from host memory"


def test_nothing_is_found_after_weights_changed(scene, tmp_path):
    stage = scene(tmp_path / "kv")
    stage(*ITEMS)
    stage.tier.forget(keeps_files=True)
    stage(*ITEMS)
    assert len(stage.counting.ran) == 6


def test_a_disk_that_hangs_holds_no_step_up(scene, tmp_path, monkeypatch):
    first = scene(tmp_path / "kv")
    first(*ITEMS)
    first.tier._writes.close(10)
    stage = scene(tmp_path / "kv")
    monkeypatch.setattr("quire.executor.kv_tier.tiered_encoder._PATIENCE_S", 0.05)
    held = []
    stage.tier._reads.submit = held.append
    assert equal(stage(*ITEMS), Counting().encode(ITEMS)) and len(stage.counting.ran) == 3
    assert len(held) <= 2, "it is not asked again"
    for each in held:
        each()
    assert not stage.tier.take_report().changes
