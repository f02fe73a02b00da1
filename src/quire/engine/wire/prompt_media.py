"""The media of a request on its way to a core."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.step.media import MediaItem


class MediaSource(Protocol):
    """Something that an item's inputs can be made of again: the bytes of a picture as they came."""

    @property
    def nbytes(self) -> int: ...

    def make_inputs(self) -> Future[dict[str, Any]]:
        """Begin to make `MediaItem.inputs`, the same values as before. Does not block."""
        ...


class PromptMedia(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The media of one prompt: its items, in the order of their places, and the positions of its n
    tokens on a model's P axes, int32 [P, n]; None: 0 .. n-1 on each.

    `sources`, by digest, stay in the front end, where the journal keeps them in place of the items'
    inputs. The inputs of an item without a source are kept themselves. `is_kept`: whether they may
    be at all; an API server whose share of that memory is full says that they may not, as it has
    told its client so.
    """

    items: list[MediaItem]
    positions: Any = None
    sources: dict[bytes, Any] = {}
    is_kept: bool = True

    def without_sources(self) -> PromptMedia:
        """The media as they travel."""
        return PromptMedia(self.items, self.positions, is_kept=self.is_kept)


class PlacedPrompt(NamedTuple):
    """A prompt as ids with its media in their places; `text`: what it was made of, if known."""

    token_ids: list[int]
    media: PromptMedia | None
    text: str | None = None
    cache_salt: str | None = None
