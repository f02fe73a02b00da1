"""Pictures of a prompt: loaded, and put among its tokens as items for the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import InvalidParameter, RequestError
from quire.media.fetch.fetcher import GivenPicture
from quire.media.given import given_pictures, picture_of_part, text_with_placeholders
from quire.media.grid_positions import grid_positions
from quire.media.loader import LoadedPicture, LoaderThread, PictureLoader
from quire.media.placed import PlacedPicture, placed_pictures
from quire.prompts import GivenMedia, ParsedPrompt
from quire.step.media import MediaItem
from quire.text.chat import PICTURE
from quire.text.tokenizer import Tokenizer, encode_prompt

IMAGE = "image"
_GRID = "image_grid_thw"


class PicturePrompts:
    """Expands the placeholders of prompts that come with pictures."""

    def __init__(self, loader: PictureLoader, tokenizer: Tokenizer, *, cell: int | None) -> None:
        """cell: rows and columns of patches that make one row of the encoder's, in a model whose
        tokens have positions on three axes; None: on one.
        """
        rule = loader.settings.rule
        assert rule is not None, "a model whose pictures are part of a prompt"
        self._loader, self._tokenizer, self._rule = loader, tokenizer, rule
        self._cell = cell
        self._soft_id = _id_of(tokenizer, rule.soft_token)
        self._placeholder_id = _id_of(tokenizer, rule.placeholder)
        self._thread: LoaderThread | None = None

    def chat(self, messages: Any, render: Callable[..., str], **options: Any) -> Any:
        """The prompt of a conversation that may have pictures: `render_chat` with `options` where
        these are markers, and the pictures with it.
        """
        texts, found = _taken(messages)
        if not found:
            return render(messages, **options)
        rule = self._rule
        join = partial(
            text_with_placeholders, placeholder=rule.placeholder, chat_text=rule.chat_text
        )
        text = render(texts, join_pictures=join, **options)
        return {"prompt": text, "multi_modal_data": {IMAGE: found}}

    async def loaded(self, media: GivenMedia) -> list[LoadedPicture]:
        """The pictures of a prompt. Raises RequestErrors for what cannot be used."""
        return await self._loader.loaded(
            _given(media), mm_processor_kwargs=dict(media.processor_kwargs)
        )

    def load(self, media: GivenMedia) -> list[LoadedPicture]:
        """As `loaded`, for programs that wait."""
        if self._thread is None:
            self._thread = LoaderThread()
        return self._thread.run(self.loaded(media))

    def close(self) -> None:
        """Release what loading needs."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def placed(
        self,
        parsed: ParsedPrompt,
        pictures: Sequence[LoadedPicture],
        encoding: Mapping[str, Any],
    ) -> tuple[ParsedPrompt, PromptMedia]:
        """The prompt as ids with its pictures' tokens, and the items there. `encoding`: arguments
        of the tokenizer. Raises RequestError where placeholders and pictures do not match.
        """
        rule, tokenizer = self._rule, self._tokenizer
        expanded = [rule.expanded(picture.processed.layout) for picture in pictures]
        if parsed.token_ids is None:
            text = rule.prompt_text(parsed.text or "", expanded)
            short = encode_prompt(tokenizer, text, encoding)
        else:
            short = rule.prompt_ids(
                parsed.token_ids,
                expanded,
                self._placeholder_id,
                encode=lambda part: tokenizer.encode(part, add_special_tokens=False),
                decode=tokenizer.decode,
            )
        ids, places = rule.widened(short, expanded, self._soft_id)
        items = [_item(placed) for placed in placed_pictures(rule, pictures, places)]
        return parsed._replace(token_ids=ids, media=None), PromptMedia(
            items, self._positions(len(ids), items)
        )

    def _positions(self, num_tokens: int, items: Sequence[MediaItem]) -> Any:
        """Those of all tokens, where they are on three axes."""
        if self._cell is None:
            return None
        grids = []
        for item in items:
            _, rows, columns = (int(n) for n in np.asarray(item.inputs[_GRID]).reshape(3))
            grids.append((item.start, rows // self._cell, columns // self._cell))
        return grid_positions(num_tokens, grids)


def _item(placed: PlacedPicture) -> MediaItem:
    return MediaItem(
        digest=placed.digest,
        modality=placed.modality,
        num_rows=placed.num_rows,
        places=placed.places,
        inputs=dict(placed.inputs),
        is_bidirectional=placed.is_bidirectional,
    )


def _given(media: GivenMedia) -> list[Any]:
    for name in (*media.data, *media.uuids):
        if name != IMAGE:
            raise RequestError(f"Unsupported modality: {name}", parameter="multi_modal_data")
    uuids = media.uuids.get(IMAGE)
    data = media.data.get(IMAGE)
    if data is None and isinstance(uuids, list | tuple):
        data = [None] * len(uuids)
    if isinstance(data, list) and data and isinstance(data[0], GivenPicture):
        return data  # out of a chat
    found: list[Any] = given_pictures(data, uuids)
    return found


def _taken(messages: Any) -> tuple[Any, list[GivenPicture]]:
    """The messages with markers in place of pictures, and these in order."""
    found: list[GivenPicture] = []

    def without(part: Any) -> Any:
        given = picture_of_part(part, len(found)) if isinstance(part, Mapping) else None
        if given is None:
            return part
        found.append(given)
        return dict(PICTURE)

    if not isinstance(messages, list | tuple):
        return messages, found
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            message = {**message, "content": [without(part) for part in content]}
        texts.append(message)
    return texts, found


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    """Raises InvalidParameter for a tokenizer that does not have the token."""
    found = tokenizer.get_vocab().get(token)
    if found is None:
        allowed = f"it lacks {token!r}, which stands for pictures in this model's prompts"
        raise InvalidParameter("tokenizer", token, allowed, "Use the model's own tokenizer.")
    return found
