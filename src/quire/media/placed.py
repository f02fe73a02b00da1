"""Pictures at their places in a prompt, as the engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.media.digests import part_digest
from quire.media.image_processors.processor import Arrays
from quire.media.loader import LoadedPicture
from quire.media.prompt_rules.rule import Place, PromptRule
from quire.step.media import EMBEDS


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """An input of an encoder, which makes `num_rows` rows of it, and their positions [start, end),
    in order. `inputs` are arrays by transformers' names. Equal digests have equal rows. It is the
    whole of `source`, or its crop number `part`.
    """

    digest: bytes
    num_rows: int
    places: list[Place]
    inputs: Arrays
    source: LoadedPicture
    part: int | None = None
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
        # rows that attend to each other have to come in one step, of which an item is the unit
        if not rule.is_bidirectional or len(own) == 1:
            placed.append(_item(rule, picture, picture.digest, list(own), arrays))
            continue
        for index, place in enumerate(own):
            part = crop(arrays, index)
            digest = part_digest(picture.digest, index)
            placed.append(_item(rule, picture, digest, [place], part, index))
    return placed


def alone(loaded: LoadedPicture) -> PlacedPicture:
    """A picture that is a prompt by itself, of which an encoder makes one row."""
    return PlacedPicture(loaded.digest, 1, [(0, 1)], loaded.processed.arrays, loaded)


def crop(arrays: Arrays, index: int) -> Arrays:
    """One of the crops of a picture."""
    return {name: array[index : index + 1] for name, array in arrays.items()}


def _item(
    rule: PromptRule,
    picture: LoadedPicture,
    digest: bytes,
    places: list[Place],
    arrays: Arrays,
    part: int | None = None,
) -> PlacedPicture:
    num_rows = sum(end - start for start, end in places)
    return PlacedPicture(
        digest,
        num_rows,
        places,
        arrays,
        picture,
        part,
        rule.is_bidirectional,
        EMBEDS if EMBEDS in arrays else "image",
    )
