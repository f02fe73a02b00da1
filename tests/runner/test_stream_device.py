"""The arena and the tables of a device that is late, against plain arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.runner.devices.arena import ALIGNMENT, Arena
from quire.runner.devices.stream_device import StreamDevice
from tests.support.late_driver import LateDriver

DTYPES = (np.int32, np.int64, np.float64, np.uint8, np.float32)


class CountingDriver(LateDriver):
    """Counts copies."""

    num_copies = 0

    def copy(self, target, source):
        self.num_copies += 1
        super().copy(target, source)


def random_arrays(draw, count):
    return [
        np.array([draw.randrange(100) for _ in range(draw.randrange(40))], draw.choice(DTYPES))
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_arrays_arrive_whatever_the_host_does_to_them_afterwards(seed):
    draw = random.Random(seed)
    device = StreamDevice(LateDriver(seed), arena_bytes=draw.choice((3000, 1 << 16)))
    for _ in range(12):
        first = random_arrays(draw, 2)
        more = random_arrays(draw, draw.randrange(4))
        wanted = [array.copy() for array in (*first, *more)]
        places = device.places(first)
        device.begin(first)
        staged = [device.stage(array) for array in more]
        device.flush()
        late = random_arrays(draw, 1)  # a mask that is known later
        wanted += [late[0].copy()]
        staged.append(device.stage(late[0]))
        device.flush()
        for array in (*first, *more, *late):
            array[:] = 77
        for tensor, array in zip([*places, *staged], wanted, strict=True):
            assert tensor.numpy().dtype == array.dtype and tensor.tolist() == array.tolist()
            assert tensor.data_ptr() % min(ALIGNMENT, 16) == 0 or not tensor.numel()


def test_a_step_is_one_copy_and_its_arrays_stay_where_they_were():
    driver = CountingDriver(0)
    device = StreamDevice(driver, arena_bytes=1 << 16)
    table = device.table(np.zeros((4, 8), np.int32))
    addresses = []
    for step in range(5):
        arrays = [np.arange(3) + step, np.arange(5, dtype=np.int32)]
        device.begin(arrays)
        settings = device.stage(np.ones((3, 4)))
        if step % 2:
            device.write(table, step % 4, 0, [step])
        before = driver.num_copies
        device.flush()
        assert driver.num_copies == before + 1
        addresses.append([t.data_ptr() for t in (*device.places(arrays), settings)])
    assert all(found == addresses[0] for found in addresses)
    device.flush()
    assert driver.num_copies == 5, "nothing was staged"


def test_the_host_does_not_wait_while_it_is_two_steps_ahead():
    driver = LateDriver(0, most_behind=10**9)
    driver._random.randint = lambda low, high: high
    arena = Arena(driver, 1 << 12, depth=2)
    for step in range(6):
        arena.begin()
        arena.append(np.arange(4))
        arena.flush()
        assert driver.num_waits == max(0, step - 2)


@pytest.mark.parametrize("seed", range(20))
def test_tables_are_what_was_written_last(seed):
    draw = random.Random(seed)
    device = StreamDevice(LateDriver(seed), arena_bytes=4096)
    wanted = np.zeros((5, 30), np.int32)
    table, other = device.table(wanted), device.table(wanted)
    for _ in range(30):
        device.begin([])
        for _ in range(draw.randrange(4)):
            row, first = draw.randrange(5), draw.randrange(30)
            values = [draw.randrange(1000) for _ in range(draw.randint(0, 30 - first))]
            device.write(table, row, first, values)
            wanted[row, first : first + len(values)] = values
        device.write(other, 0, 0, [7])
        device.flush()
        assert (table.numpy() == wanted).all()
    rows, columns = torch.tensor([1, 4, 0]), torch.tensor([2, 29, 0])
    device.put(table, rows, columns, torch.tensor([5, 6, 7]))
    into = torch.zeros(3, dtype=torch.int64)
    device.take(table, rows, columns, into)
    assert into.tolist() == [5, 6, 7]
    assert other[0, 0] == 7 and int(other.sum()) == 7


def test_results_hold_nothing_until_they_are_waited_for():
    driver = LateDriver(0, most_behind=10**9)
    driver._random.randint = lambda low, high: high
    device = StreamDevice(driver, arena_bytes=256)
    source = torch.arange(6).view(2, 3)
    fetched = device.fetch([source, torch.ones(2)])
    source.zero_()  # the next step's work
    assert not torch.equal(fetched._values[0], torch.arange(6).view(2, 3))
    ids, ones = fetched.wait()
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5]] and ones.tolist() == [1, 1]
