"""Tiles of Triton's products: what must hold of them for any weight and any number of rows."""

from __future__ import annotations

from itertools import product

import pytest

from quire.runner.forward.decode_graphs import decode_sizes
from tests.support.needs import needs_triton

pytestmark = needs_triton

OUTPUTS = (1, 40, 1024, 2048, 4096, 6144, 28_672, 151_936)
STORED = ((4, 64), (4, 128), (4, 256), (8, 1), (16, 1))
"""Bits of a weight, and inputs of a pair of groups."""
SHARED = {"Hopper": 227 << 10, "A100": 163 << 10, "Ada": 99 << 10}


@pytest.fixture(scope="module")
def tiles():
    return pytest.importorskip("quire.kernels.triton.linear.product_tiles")


def shapes(tiles, shared):
    for outputs, (bits, unit), x_bytes in product(OUTPUTS, STORED, (1, 2)):
        if bits != 16 or x_bytes == 2:
            yield tiles.ProductShape(outputs, bits, x_bytes, unit, shared_memory=shared)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 17, 100, 256, 300, 1024])
def test_steps_of_the_captured_sizes_have_every_tile_that_fewer_rows_have(tiles, num_rows):
    def classes(counts, unit):
        return {tiles.row_class(rows, unit, is_fixed=False) for rows in counts}

    for unit in (1, 128, 256):
        assert classes(range(1, num_rows + 1), unit) <= classes(decode_sizes(num_rows), unit)


def test_a_row_s_tile_is_the_same_alone_and_crowded_where_it_must(tiles):
    assert len({tiles.row_class(rows, 1, is_fixed=True) for rows in range(1, 5000)}) == 1


@pytest.mark.parametrize("gpu", SHARED)
def test_tiles_fit_the_gpu_and_hold_whole_pairs_of_groups(tiles, gpu):
    """One step of tiles less is in shared memory than is read ahead, on GPUs before Hopper."""
    for shape in shapes(tiles, SHARED[gpu]):
        for rows in (1, 100, 1000):
            tile = tiles.tile_of(tiles.row_class(rows, shape.unit, is_fixed=False), shape)
            assert tile.depth % shape.unit == 0
            stage = tile.depth * (tile.outputs * shape.bits // 8 + tile.rows * shape.x_bytes)
            stages = tile.stages - (gpu != "Hopper")
            assert stages * stage <= SHARED[gpu], (shape, tile)


def test_weights_of_four_bits_have_no_tile_of_many_rows_that_spills(tiles):
    assert tiles.row_class(2048, 128, is_fixed=False) > tiles.row_class(2048, 256, is_fixed=False)


def test_few_rows_keep_most_sms_busy_where_there_are_outputs_for_it(tiles):
    for shape in shapes(tiles, SHARED["Hopper"]):
        tile = tiles.tile_of(tiles.row_class(1, shape.unit, is_fixed=False), shape)
        assert tile.rows == 16
        if shape.outputs >= 2048:
            assert shape.outputs / tile.outputs >= 120, (shape, tile)
