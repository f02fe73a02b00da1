"""Single moments of the kill table: 64 streams, and something that dies at a random moment."""

import asyncio
import signal

import pytest

from quire.hardware.native import find_native
from tests.support import kill_table as table

pytestmark = pytest.mark.slow


def assert_sound(row, num_failed=0):
    assert (row.num_wrong, row.num_failed, row.leaks) == (0, num_failed, [])
    assert row.num_right == row.num_moments * table.NUM_STREAMS - num_failed


@pytest.mark.parametrize(("num_cores", "how"), [(1, signal.SIGKILL), (2, signal.SIGSTOP)])
@pytest.mark.sharp(when=lambda num_cores: num_cores == 2)  # of one: client/test_supervisor.py
def test_streams_survive_their_core(num_cores, how):
    row = asyncio.run(table.signal_cores(how, 1, num_cores=num_cores))
    assert_sound(row)
    assert row.num_restarts == 1
    assert len(row.resumed_s) == 1


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        (signal.SIGKILL, {"tensor_parallel_size": 2}),
        (signal.SIGSTOP, {"pipeline_parallel_size": 2}),
    ],
)
@pytest.mark.full
@pytest.mark.skipif(find_native()[0] is None, reason="ranks exchange by native code")
def test_streams_survive_a_rank(how, sizes):
    row = asyncio.run(table.signal_ranks(how, 1, **sizes))
    assert_sound(row)
    assert row.num_restarts == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.full
@pytest.mark.skipif(find_native()[0] is None, reason="ranks exchange by native code")
def test_streams_survive_a_rank_of_a_core_that_shares_experts(how):
    row = asyncio.run(table.signal_ranks(how, 1, tensor_parallel_size=2, shares_experts=True))
    assert_sound(row)
    assert row.num_restarts == 2  # of both cores


def test_a_front_end_that_stands_still_loses_nothing():
    row = asyncio.run(table.stop_front_end(1, stopped_s=1.5))
    assert_sound(row)
    assert row.num_restarts == 0


def test_no_core_outlives_its_front_end():
    row = table.kill_front_end(1)
    assert row.leaks == []
    assert len(row.resumed_s) == 1


def test_a_wrong_stream_is_told_from_a_right_one():
    row = table.Row("nobody")
    expected = [([1, 2], "length")] * 4
    table._count(
        row,
        [([1, 2], "length"), ([1], "error"), ([1, 3], "length"), ([1, 2, 3], "error")],
        expected,
    )
    assert (row.num_right, row.num_failed, row.num_wrong) == (1, 1, 2)
