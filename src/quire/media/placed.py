"""Pictures at their places in a prompt, as the engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.media.digests import part_digest
from quire.media.image_processors.processor import Arrays
from quire.media.loader import LoadedPicture
from quire.media.prompt_rules.rule import Place, PromptRule


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """An input of an encoder, which makes `num_rows` rows of it, and their positions [start, end),
    in order. `inputs` are arrays by transformers' names. Equal digests have equal rows.
    """

    digest: bytes
    num_rows: int
    places: list[Place]
    inputs: Arrays
    is_bidirectional: bool = False
    modality: str = "image"


def placed_pictures(
    rule: PromptRule, loaded: Sequence[LoadedPicture], places: Sequence[Sequence[Place]]
) -> list[PlacedPicture]:
    """The pictures of a prompt, whose rows stand at `places` (`PromptRule.widened`). One whose rows
    attend to each other stands in one place: the crops of a picture are items of their own.
    """
    placed = []
    for picture, own in zip(loaded, places, strict=True):
        arrays = picture.processed.arrays
        if not rule.is_bidirectional or len(own) == 1:
            placed.append(_item(rule, picture.digest, list(own), arrays))
            continue
        for index, place in enumerate(own):
            part = {name: array[index : index + 1] for name, array in arrays.items()}
            placed.append(_item(rule, part_digest(picture.digest, index), [place], part))
    return placed


def _item(rule: PromptRule, digest: bytes, places: list[Place], arrays: Arrays) -> PlacedPicture:
    num_rows = sum(end - start for start, end in places)
    return PlacedPicture(digest, num_rows, places, arrays, rule.is_bidirectional)
