"""Transfers of blocks without an engine: where contents come from."""

import threading

import numpy as np
import torch

from quire.runner import block_transfers
from quire.runner.block_transfers import BlockTransfers
from quire.step.plan import BlockTransfer, StepPlan
from quire.tiers.checksum import content_sum
from quire.tiers.disk_store import DiskStore
from quire.tiers.plan import DiskTierPlan
from quire.tiers.slot_table import SlotTable

SIZE = 64


class Blocks:
    """K/V memory of blocks that are a number each."""

    def __init__(self, count):
        self.memory = torch.zeros(count, SIZE, dtype=torch.uint8)

    def mark(self):
        return None

    def read(self, group, block, slot):
        slot.copy_(self.memory[block])
        return content_sum(slot.numpy())

    def write(self, group, block, slot):
        self.memory[block] = slot
        return content_sum(slot.numpy())


def key(number):
    return bytes([number]) * 32


def step(**transfers):
    return StepPlan(
        step_id=0, removed=[], added=[], new_blocks=[], decode_rows=[], chunks=[], **transfers
    )


def ended(transfers):
    done, failed = [], []
    while not done and not failed:
        transfers.wait(5.0)
        report = transfers.take_report()
        done, failed = done + report.done, failed + report.failed
    return done, failed


def test_files_of_a_load_do_not_push_out_what_it_finds_in_host_memory(tmp_path):
    store = DiskStore(tmp_path / "kv", "ab" * 20, 1 << 20)
    seven = np.full(SIZE, 7, dtype=np.uint8)
    store.put((key(7), 0), seven, content_sum(seven))
    table = SlotTable(SIZE, 2)
    memory = torch.frombuffer(table.memory, dtype=torch.uint8)
    slots = [memory[table.start_of(i) :][:SIZE] for i in range(2)]
    copies = Blocks(8)
    copies.memory[1], copies.memory[2] = 1, 2
    plan = DiskTierPlan(str(tmp_path / "kv"), 1 << 20, 1, 1)
    transfers = BlockTransfers(copies, slots, table, [SIZE], plan)
    for number in (1, 2):
        transfers.begin(step(stores=[BlockTransfer(number, number, key(number), 0)]))
        assert ended(transfers) == ([number], [])
    store.has = lambda key: True  # none of it is written: the oldest slot is the only place of 1
    transfers.open(lambda: store, now=True)
    transfers.settle()
    del store.has
    loads = [BlockTransfer(3, 5, key(7), 0), BlockTransfer(3, 6, key(1), 0)]
    transfers.begin(step(loads=loads))
    assert ended(transfers) == ([3], [])
    assert copies.memory[5:7, 0].tolist() == [7, 1]
    transfers.close()


def test_a_disk_that_is_behind_gets_all_that_host_memory_still_has(tmp_path, monkeypatch):
    monkeypatch.setattr(block_transfers, "_WAITING_BYTES", 2 * SIZE)
    store, goes_on = DiskStore(tmp_path / "kv", "ab" * 20, 1 << 20), threading.Event()
    table = SlotTable(SIZE, 6)
    memory = torch.frombuffer(table.memory, dtype=torch.uint8)
    slots = [memory[table.start_of(i) :][:SIZE] for i in range(6)]
    plan = DiskTierPlan(str(tmp_path / "kv"), 1 << 20, 1, 1)
    transfers = BlockTransfers(Blocks(9), slots, table, [SIZE], plan)
    transfers.open(lambda: store, now=True)
    put = store.put
    store.put = lambda *args: goes_on.wait(10.0) and put(*args)
    stores = [BlockTransfer(number, number, key(number), 0) for number in range(1, 9)]
    done = []
    transfers.begin(step(stores=stores))
    while len(done) < len(stores):
        done += ended(transfers)[0]
    goes_on.set()
    transfers.close()
    # 1 and 2 were on their way; 3 and 4 have made room for 7 and 8
    assert sorted(found[0][0] for found in store.contents()) == [1, 2, 5, 6, 7, 8]
