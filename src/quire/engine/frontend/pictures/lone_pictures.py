"""Prompts of models that compare texts and pictures (CLIP, SigLIP): one of them is a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.frontend.pictures.prompts_with_pictures import PromptsWithPictures, item_of
from quire.engine.wire.prompt_media import PlacedPrompt, PromptMedia
from quire.errors import RequestError
from quire.media.chat_text import PicturesAsText
from quire.media.loader import LoadedPicture, PictureLoader
from quire.media.placed import alone
from quire.media.prompt_rules.rule import ExpandedPicture
from quire.media.remaking import PictureRemaker
from quire.prompts import ParsedPrompt

_PLACEHOLDER = "<image>"
_TOKEN = 0
"""Stands where the picture's row does. Nothing is made of its embedding."""


class LonePictures(PromptsWithPictures):
    """Makes a prompt of one token of a picture, whose vector is what the encoder makes."""

    def __init__(self, loader: PictureLoader, remaker: PictureRemaker) -> None:
        super().__init__(loader, remaker)
        self.as_text = PicturesAsText(_PLACEHOLDER, _PLACEHOLDER)

    @property
    def needs_template(self) -> bool:
        return False

    def placed(
        self,
        parsed: ParsedPrompt,
        pictures: Sequence[LoadedPicture],
        encoding: Mapping[str, Any],
    ) -> PlacedPrompt:
        expanded = self.expanded(pictures)
        if parsed.token_ids:
            raise _refusal()
        self.prompt_text(parsed.text or "", expanded)
        placed = self.widened((), pictures, expanded)
        return placed._replace(text=parsed.text, cache_salt=parsed.cache_salt)

    def expanded(self, pictures: Sequence[LoadedPicture]) -> list[ExpandedPicture]:
        return [ExpandedPicture("", (1,)) for _ in pictures]

    def prompt_text(self, text: str, expanded: Sequence[ExpandedPicture]) -> str:
        if len(expanded) != 1 or text.replace(_PLACEHOLDER, "").strip():
            raise _refusal()
        return ""

    def widened(
        self,
        short: Sequence[int],
        pictures: Sequence[LoadedPicture],
        expanded: Sequence[ExpandedPicture],
    ) -> PlacedPrompt:
        [picture] = pictures
        placed = alone(picture)
        media = PromptMedia([item_of(placed)], sources=self._made_again([placed]))
        return PlacedPrompt([_TOKEN], media)


def _refusal() -> RequestError:
    return RequestError(
        "A prompt of this model is either a text or one picture, and each has a vector of its own. "
        "Send them as two prompts; the text of a picture's is empty.",
        parameter="prompt",
    )
