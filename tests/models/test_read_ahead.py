"""Leaves read ahead of the builder: the same values, bounded, and failures where they belong."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.models.families import read_spec
from quire.models.loading.random_weights import DeviceRandomLeaves, RandomLeaves
from quire.models.loading.read_ahead import ReadAhead
from quire.models.parameters import Parameter, parameters
from quire.testing.model_shapes import make_config


def leaf_of(i, shape):
    return Parameter(f"leaf{i}", shape, "column", "matrix")


def leaves():
    return list(parameters(read_spec(make_config("tiny", "qwen3"))).values())


def test_the_values_are_those_that_were_read():
    draw, names = RandomLeaves(3), leaves()
    ahead = ReadAhead(draw, names, is_pinned=False)
    for leaf in names:
        assert torch.equal(ahead(leaf), draw(leaf))
    ahead.close()


def test_a_view_that_is_valid_until_the_next_call_may_be_reused():
    memory = torch.zeros(1 << 20)
    wanted = [leaf_of(i, (1 << 20,)) for i in range(6)]

    def read(leaf):
        return memory.fill_(float(leaf.name[4:]))

    ahead = ReadAhead(read, wanted, is_pinned=False)
    for i, leaf in enumerate(wanted):
        assert (ahead(leaf) == i).all()
    ahead.close()


def test_another_order_works():
    draw, names = RandomLeaves(0), leaves()
    ahead = ReadAhead(draw, names, is_pinned=False, most_bytes=1)
    for leaf in reversed(names):
        assert torch.equal(ahead(leaf), draw(leaf))
    ahead.close()


def test_it_reads_no_further_than_the_bound():
    read, enough = [], threading.Event()

    def reading(leaf):
        read.append(leaf.name)
        if len(read) == 3:
            enough.set()
        return torch.zeros(1000)

    wanted = [leaf_of(i, (1000,)) for i in range(50)]
    ahead = ReadAhead(reading, wanted, is_pinned=False, most_bytes=9000)
    assert enough.wait(30)
    ahead(wanted[0])
    ahead.close()
    assert read == [f"leaf{i}" for i in range(len(read))] and 3 <= len(read) <= 4


def test_a_failure_is_raised_for_the_leaf_that_is_missing_and_not_before():
    wanted = [leaf_of(i, (4,)) for i in range(4)]

    def read(leaf):
        if leaf.name == "leaf2":
            raise OSError("the file is gone")
        return torch.ones(4)

    ahead = ReadAhead(read, wanted, is_pinned=False)
    assert ahead(wanted[0]).tolist() == [1] * 4
    assert ahead(wanted[1]).tolist() == [1] * 4
    for _ in range(2):
        with pytest.raises(OSError, match="is gone"):
            ahead(wanted[2])
    ahead.close()
    assert not ahead._thread.is_alive()


def test_closing_early_ends_the_threads():
    wanted = [leaf_of(i, (4,)) for i in range(1000)]
    ahead = ReadAhead(lambda leaf: torch.ones(4), wanted, is_pinned=False, most_bytes=32)
    ahead.close()
    assert not ahead._thread.is_alive()


def test_leaves_drawn_on_a_device_have_the_distribution_of_those_of_the_host():
    device = torch.device("cpu")
    host, drawn = RandomLeaves(1), DeviceRandomLeaves(1, device)
    for leaf in leaves():
        mine, its = drawn(leaf).float(), host(leaf).float()
        assert mine.shape == its.shape and torch.equal(mine, drawn(leaf).float())
        if leaf.size >= 10_000:
            assert abs(mine.mean() - its.mean()) < 0.05 * its.std()
            assert abs(mine.std() / its.std() - 1) < 0.05
            assert not torch.equal(mine, DeviceRandomLeaves(2, device)(leaf).float())
