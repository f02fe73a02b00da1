"""Bytes through the ring of one host: in any sizes on both sides, read in place or copied, and
senders and receivers that leave.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from quire.distributed import host_broadcasts
from quire.distributed.host_broadcasts import open_side
from quire.distributed.meeting import Meeting
from quire.errors import WeightUpdateError

RING = 4096


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    monkeypatch.setattr(host_broadcasts, "_PIECE_BYTES", 512)
    monkeypatch.setattr(host_broadcasts, "_RING_BYTES", RING)


def opened(count, timeout_s=10.0):
    """The sides of a group, whose calls fail after a while."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(count) as pool:
        made = [
            pool.submit(open_side, Meeting(store, rank, count, timeout_s=10.0), timeout_s)
            for rank in range(count)
        ]
    return [side.result() for side in made]


def cut(draw, total, most):
    """Sizes that are `total` together, with empty ones."""
    sizes = []
    while total:
        sizes.append(min(total, draw.choice([0, 1, 7, 64, 100, most // 4, draw.randint(0, most)])))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("are_alike", [True, False])
def test_bytes_arrive_however_they_are_cut(are_alike):
    draw = random.Random(5)
    data = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    sizes = cut(draw, len(data), 3 * RING)
    sender, *receivers = opened(3)

    def send():
        for part in data.split(sizes):
            sender.send(part, draw.choice([1, 7, 40, 600]))

    def read(receiver, seed):
        choose = random.Random(seed)
        mine = list(sizes) if are_alike else cut(choose, len(data), 2 * RING)
        found, num_lent = [], 0
        while mine:
            count = choose.randint(1, 5)
            window, mine = mine[:count], mine[count:]
            if choose.random() < 0.2:
                for size in window:
                    found.append(torch.empty(size, dtype=torch.uint8))
                    receiver.receive(found[-1])
                continue
            row = choose.choice([1, 7, 64, 200])
            for size in window:
                for part in receiver.rows(size // row, row):
                    num_lent += part._base is not None and len(part._base) > 1000
                    found.append(part.flatten().clone())
                found.append(torch.empty(size % row, dtype=torch.uint8))
                receiver.receive(found[-1])
        return torch.cat(found), num_lent

    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(send)
        reading = [pool.submit(read, receiver, i) for i, receiver in enumerate(receivers)]
        sending.result()
        for found, num_lent in (each.result() for each in reading):
            assert torch.equal(found, data) and num_lent >= 10 * are_alike
    sender.close()


def test_many_small_pieces_leave_room_for_the_next(monkeypatch):
    """In a ring that is never full."""
    monkeypatch.setattr(host_broadcasts, "_RING_BYTES", 1 << 20)
    sender, *receivers = opened(3)
    count, found = 2000, torch.empty(1, dtype=torch.uint8)

    def send():
        for i in range(count):
            sender.send(torch.full((1,), i % 256, dtype=torch.uint8))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for i in range(count):
            for receiver in receivers:
                receiver.receive(found)
                assert int(found) == i % 256
        sending.result()
    sender.close()


def test_whoever_is_left_learns_it_at_once():
    sender, first, second = opened(3, timeout_s=60.0)
    sender.send(torch.ones(100, dtype=torch.uint8))
    sender.close()
    for receiver in (first, second):
        found = torch.empty(100, dtype=torch.uint8)
        receiver.receive(found)
        assert found.all()
        with pytest.raises(WeightUpdateError, match="is gone"):
            receiver.receive(found)
    sender, first, second = opened(3, timeout_s=60.0)
    second.close()
    with pytest.raises(WeightUpdateError, match="is gone"):
        for _ in range(10):
            sender.send(torch.ones(RING // 2, dtype=torch.uint8))


def test_a_call_ends_when_another_thread_leaves():
    sender, receiver = opened(2, timeout_s=60.0)
    found = []

    def wait():
        with pytest.raises(WeightUpdateError):
            receiver.receive(torch.empty(8, dtype=torch.uint8))
        found.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    receiver.close()
    thread.join(10)
    assert found
    sender.close()


def test_hosts_that_differ_share_nothing(monkeypatch):
    names = iter("ab")
    monkeypatch.setattr(host_broadcasts, "host_id", lambda: next(names).encode())
    assert opened(2) == [None, None]
