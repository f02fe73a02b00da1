"""A core that is killed under streams: the next one loads their K/V from memory that is left."""

import asyncio

from benchmarks.kv_tier_kills import is_bad, table


def test_streams_go_on_from_what_a_dead_core_has_stored():
    [row] = asyncio.run(table(4, 1, "core SIGKILL, memory alone"))
    assert not is_bad(row), list(row.cells())
    assert row.restarts == 1 and row.num_right == 8
