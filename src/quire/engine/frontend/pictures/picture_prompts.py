"""Pictures of a prompt, put among its tokens as items for the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.engine.frontend.pictures.prompts_with_pictures import PromptsWithPictures, item_of
from quire.engine.wire.prompt_media import PlacedPrompt, PromptMedia
from quire.errors import InvalidParameter, RequestError
from quire.media.chat_text import PicturesAsText
from quire.media.decoding.decoder import ProcessedPicture
from quire.media.grid_positions import grid_positions
from quire.media.loader import LoadedPicture, PictureLoader
from quire.media.placed import placed_pictures
from quire.media.prompt_rules.rule import ExpandedPicture
from quire.media.remaking import PictureRemaker
from quire.prompts import ParsedPrompt
from quire.step.media import EMBEDS, MediaItem
from quire.text.tokenizer import Tokenizer, encode_prompt

_GRID = "image_grid_thw"
_NO_TOKEN = -1
"""Stands for the id of a placeholder that is text, which prompts of ids cannot have."""


class PicturePrompts(PromptsWithPictures):
    """Expands the placeholders of prompts that come with pictures."""

    def __init__(
        self,
        loader: PictureLoader,
        remaker: PictureRemaker,
        tokenizer: Tokenizer,
        *,
        cell: int | None,
        interleaves: bool = False,
    ) -> None:
        """cell: rows and columns of patches that make one row of the encoder's, in a model whose
        tokens have positions on three axes; None: on one. interleaves: see `PicturesAsText`.
        """
        super().__init__(loader, remaker)
        rule = loader.settings.rule
        assert rule is not None, "a model whose pictures are part of a prompt"
        self._tokenizer, self._rule = tokenizer, rule
        self._cell = cell
        self._soft_id = _id_of(tokenizer, rule.soft_token)
        self._placeholder_id = tokenizer.get_vocab().get(rule.placeholder, _NO_TOKEN)
        self.as_text = PicturesAsText(rule.placeholder, rule.chat_text, interleaves)

    def placed(
        self,
        parsed: ParsedPrompt,
        pictures: Sequence[LoadedPicture],
        encoding: Mapping[str, Any],
    ) -> PlacedPrompt:
        expanded = self.expanded(pictures)
        if parsed.token_ids is None:
            text = self.prompt_text(parsed.text or "", expanded)
            short = encode_prompt(self._tokenizer, text, encoding)
        else:
            short = self._rule.prompt_ids(
                parsed.token_ids,
                expanded,
                self._placeholder_id,
                encode=lambda part: self._tokenizer.encode(part, add_special_tokens=False),
                decode=self._tokenizer.decode,
            )
        return self.widened(short, pictures, expanded)._replace(
            text=parsed.text, cache_salt=parsed.cache_salt
        )

    def expanded(self, pictures: Sequence[LoadedPicture]) -> list[ExpandedPicture]:
        return [self._expanded_one(picture.processed) for picture in pictures]

    def prompt_text(self, text: str, expanded: Sequence[ExpandedPicture]) -> str:
        return self._rule.prompt_text(text, expanded)

    def widened(
        self,
        short: Sequence[int],
        pictures: Sequence[LoadedPicture],
        expanded: Sequence[ExpandedPicture],
    ) -> PlacedPrompt:
        ids, places = self._rule.widened(short, expanded, self._soft_id)
        placed = placed_pictures(self._rule, pictures, places)
        prefix = len(ids) if self._rule.has_whole_prompt else 0
        items = [item_of(each, prefix) for each in placed]
        sources = self._made_again(placed)
        return PlacedPrompt(ids, PromptMedia(items, self._positions(len(ids), items), sources))

    def _expanded_one(self, picture: ProcessedPicture) -> ExpandedPicture:
        """The tokens of a picture, of which only the number of rows may be known."""
        expanded = self._rule.expanded(picture.layout)
        rows = picture.arrays.get(EMBEDS)
        if rows is None:
            return expanded
        if len(expanded.runs) != 1:
            raise RequestError(
                "A picture of this model stands in several places of a prompt, so it cannot be "
                "given as embeddings. Send the picture.",
                parameter="image_embeds",
            )
        return ExpandedPicture(expanded.text, (len(rows),))

    def _positions(self, num_tokens: int, items: Sequence[MediaItem]) -> Any:
        """Positions of all tokens, in models that have them on three axes."""
        if self._cell is None:
            return None
        grids = []
        for item in items:
            _, rows, columns = (int(n) for n in np.asarray(item.inputs[_GRID]).reshape(3))
            grids.append((item.start, rows // self._cell, columns // self._cell))
        return grid_positions(num_tokens, grids)


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    """Raises InvalidParameter for a tokenizer that does not have the token."""
    found = tokenizer.get_vocab().get(token)
    if found is None:
        allowed = f"it lacks {token!r}, which stands for pictures in this model's prompts"
        raise InvalidParameter("tokenizer", token, allowed, "Use the model's own tokenizer.")
    return found
