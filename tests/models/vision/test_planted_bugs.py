"""Slips that the comparison with transformers notices: each changes an answer of a small model."""

import dataclasses

import msgspec
import pytest

from quire.engine.frontend.pictures import picture_prompts
from quire.models.vision.encoder import VisionEncoder
from tests.models.vision.spoken import write_spoken
from tests.models.vision.test_pictures import PARAMS, as_prompt, check, engine, prompts

pytestmark = pytest.mark.full


def positions_one_too_far(monkeypatch):
    made = picture_prompts.grid_positions

    def shifted(num_tokens, grids):
        found = made(num_tokens, grids)
        end = max((start + rows * columns for start, rows, columns in grids), default=num_tokens)
        found[:, end:] += 1
        return found

    monkeypatch.setattr(picture_prompts, "grid_positions", shifted)


def rows_and_columns_exchanged(monkeypatch):
    made = picture_prompts.grid_positions
    monkeypatch.setattr(
        picture_prompts, "grid_positions", lambda count, grids: made(count, grids)[[0, 2, 1]]
    )


def with_item(change):
    def plant(monkeypatch):
        made = picture_prompts.item_of
        monkeypatch.setattr(
            picture_prompts, "item_of", lambda placed, prefix: change(made(placed, prefix))
        )

    return plant


def with_pictures(before=lambda pictures: pictures, after=lambda rows: rows):
    def plant(monkeypatch):
        encode = VisionEncoder.encode
        monkeypatch.setattr(
            VisionEncoder, "encode", lambda self, given: after(encode(self, before(given)))
        )

    return plant


def in_blue_green_red(pictures):
    return [dataclasses.replace(each, pixels=each.pixels.flip(1)) for each in pictures]


SLIPS = {
    "positions after a picture": ("qwen2_vl", positions_one_too_far, {}),
    "rows for columns": ("qwen2_vl", rows_and_columns_exchanged, {}),
    "pictures in another order": ("llava", with_pictures(after=lambda rows: rows[::-1]), {}),
    "rows in another order": (
        "llava",
        with_pictures(after=lambda rows: [each.roll(1, 0) for each in rows]),
        {},
    ),
    "one name for all pictures": (
        "llava",
        with_item(lambda item: msgspec.structs.replace(item, digest=b"x" * 32)),
        {},
    ),
    "blue for red": ("llava", with_pictures(before=in_blue_green_red), {}),
    "another filter": ("llava", lambda monkeypatch: None, {"mm_processor_kwargs": {"resample": 0}}),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_the_answers_show_a_slip(slip, tmp_path, monkeypatch):
    name, plant, options = SLIPS[slip]
    model = write_spoken(name, tmp_path)
    plant(monkeypatch)
    asked = prompts()
    outputs = engine(tmp_path, **options).generate([as_prompt(*each) for each in asked], PARAMS)
    with pytest.raises(AssertionError):
        check(model, name, tmp_path, outputs, asked)
    check(model, name, tmp_path, outputs[-1:], asked[-1:])  # of text alone, they do not change
