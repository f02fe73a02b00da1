"""Positions on three axes, as Qwen2-VL counts them."""

import numpy as np

from quire.models.vision.axes import axial_positions


def test_text_advances_all_axes_at_once():
    assert axial_positions(4, []).tolist() == [[0, 1, 2, 3]] * 3


def test_a_picture_counts_rows_and_columns_and_text_goes_on_after_the_largest():
    found = axial_positions(12, [(2, (1, 2, 3))])
    assert found.dtype == np.int32
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_pictures_may_follow_each_other_and_end_a_prompt():
    found = axial_positions(8, [(0, (1, 2, 1)), (2, (2, 1, 3))])
    assert found[0].tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert found[1].tolist() == [0, 1, 2, 2, 2, 2, 2, 2]
    assert found[2].tolist() == [0, 0, 2, 3, 4, 2, 3, 4]
