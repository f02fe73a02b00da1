"""Media of a prompt: what stands at placeholders among its ids, and what encoders make rows of.

Arrays are opaque here, so that the scheduler, which passes items on, needs no library for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

EMBEDS = "embeds"
"""The modality of embeddings that come with a prompt, as the input of this name."""
ROWS_OF_EMBEDS = 64
"""Rows of the items that long embeddings are cut into: prompts that begin alike share the cached
blocks up to the first item that differs, and no item is larger than a step.
"""


class EmbeddedSpan(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, end) of a prompt, where rows of an encoder's output stand in place of the
    embeddings of the ids, which are placeholders: the rows from `first_row` on of the item
    `digest`. `is_bidirectional` and `prefix`: see `MediaItem`.
    """

    start: int
    end: int
    digest: bytes
    first_row: int = 0
    is_bidirectional: bool = False
    prefix: int = 0

    @property
    def whole(self) -> tuple[int, int] | None:
        """As `MediaItem.whole`."""
        return _whole(self)


class Source(msgspec.Struct, frozen=True, gc=False):
    """A row's second content: `num_rows` rows of an encoder's output, by the digest of its item.
    is_written: their keys and values are in the row's blocks; if not, its first chunk writes them.
    """

    digest: bytes
    num_rows: int
    is_written: bool


class MediaItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A picture, a video or a sound of a prompt, or embeddings that were given for a part of it.

    The encoder for its `modality` makes `num_rows` rows of `inputs`, arrays by name. They stand at
    the positions of `places`, in order: ranges [start, end), ascending, `num_rows` positions in
    all. Between two ranges are tokens as others (ends of lines, times), which belong to the item.
    A bidirectional item has one range, whose positions attend to each other in both directions;
    with a `prefix` the first so many positions of the prompt do, of which it is a part. An item
    without places is the request's second content: the source that layers of cross-attention read,
    whole, from its first token on.

    `digest` names everything that determines the rows, but for the weights of the model: equal
    digests, equal rows.
    """

    digest: bytes
    modality: str
    num_rows: int
    places: list[tuple[int, int]]
    inputs: dict[str, Any] = {}
    is_bidirectional: bool = False
    prefix: int = 0

    @property
    def start(self) -> int:
        return self.places[0][0] if self.places else 0

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.places[-1][1] if self.places else 0

    @property
    def whole(self) -> tuple[int, int] | None:
        """Positions [start, stop) that attend to each other, so that one step has them; or None."""
        return _whole(self)

    def spans(self) -> Iterator[EmbeddedSpan]:
        """The ranges with the rows that stand there."""
        row = 0
        for start, end in self.places:
            yield EmbeddedSpan(start, end, self.digest, row, self.is_bidirectional, self.prefix)
            row += end - start


def _whole(part: EmbeddedSpan | MediaItem) -> tuple[int, int] | None:
    if not part.is_bidirectional:
        return None
    return (0, part.prefix) if part.prefix else (part.start, part.end)
