"""Prompts that come with pictures, whatever these become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.wire.prompt_media import PlacedPrompt
from quire.errors import RequestError
from quire.media.chat_text import PicturesAsText
from quire.media.fetch.fetcher import GivenPicture
from quire.media.given import PICTURE_TYPES, given_pictures, picture_of_part
from quire.media.given_rows import RowsReader
from quire.media.io_options import background_of
from quire.media.loader import LoadedPicture, LoaderThread, PictureLoader
from quire.media.placed import PlacedPicture
from quire.media.prompt_rules.rule import ExpandedPicture
from quire.media.remaking import PictureRemaker, PictureSource
from quire.prompts import GivenMedia, ParsedPrompt
from quire.step.media import MediaItem
from quire.text.chat import PICTURE, content_parts

IMAGE = "image"

_FIELDS = (b'"image_url":', b'"image_url" :', b'"source":')
"""Fields of parts that are pictures, as bodies have them: within a text quotes are escaped."""
_OTHER_FIELDS = 256
"""Number of such fields that may belong to something else, such as the schema of a tool."""


class PromptsWithPictures(ABC):
    """Makes prompts of texts and pictures: loads these, and puts them where `placed` says."""

    as_text: PicturesAsText
    """Stands for pictures in chats whose templates know text alone."""

    def __init__(self, loader: PictureLoader, remaker: PictureRemaker) -> None:
        self._loader, self._remaker = loader, remaker
        self._thread: LoaderThread | None = None

    def cache_counts(self) -> tuple[int, int]:
        """The number of processed pictures that were looked for in the cache, and found there."""
        return self._loader.cache.num_queries, self._loader.cache.num_hits

    def chat(self, messages: Any, render: Callable[..., str], **options: Any) -> Any:
        """A conversation's prompt by `render_chat`, with markers for pictures, and these."""
        texts, found = self.taken_out(messages)
        if not found:
            return render(messages, **options)
        text = render(texts, join_pictures=self.as_text, **options)
        return {"prompt": text, "multi_modal_data": {IMAGE: found}}

    def content(self, parts: Sequence[Any]) -> tuple[str, list[GivenPicture]]:
        """The text of a message's parts where placeholders stand for pictures, and these in order.
        Raises RequestError for parts that are malformed, and for too many pictures.
        """
        [message], found = self.taken_out([{"content": list(parts)}])
        return self.text_of(message["content"]), found

    def text_of(self, parts: Sequence[Any]) -> str:
        """The text of parts with markers in place of pictures. Raises RequestError."""
        plain = content_parts(parts, "content", takes_pictures=True)
        return self.as_text([part.get("text") for part in plain])

    def check_count(self, num: int) -> None:
        """Raise RequestError for more pictures than a prompt may have."""
        self._loader.check_count(num)

    def check_body(self, data: bytes) -> None:
        """Raise RequestError for JSON with far too many pictures, which is never decoded."""
        self._loader.check_count(sum(map(data.count, _FIELDS)) - _OTHER_FIELDS)

    def taken_out(self, messages: Any) -> tuple[Any, list[GivenPicture]]:
        """The messages with markers in place of pictures, and these in order. Raises RequestError
        for parts that are malformed, and for too many pictures.
        """
        self._loader.check_count(_least_count(messages))  # before something is made of each
        texts, found = _taken_out(messages)
        self._loader.check_count(len(found))
        return texts, found

    async def loaded(self, media: GivenMedia, scope: str | None = None) -> list[LoadedPicture]:
        """A prompt's pictures. `scope`: see `PictureLoader.loaded`. Raises RequestErrors."""
        return await self._loader.loaded(
            _given(media, self._loader.rows),
            mm_processor_kwargs=dict(media.processor_kwargs),
            scope=scope,
            background=background_of(media.io_kwargs) if media.io_kwargs else None,
        )

    def load(self, media: GivenMedia) -> list[LoadedPicture]:
        """As `loaded`, for programs that wait."""
        if self._thread is None:
            self._thread = LoaderThread()
        return self._thread.run(self.loaded(media))

    def forget(self) -> None:
        self._loader.cache.clear()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._remaker.close()
        self._loader.close()

    @property
    def needs_template(self) -> bool:
        """Whether a conversation with pictures is rendered with the chat template."""
        return True

    @abstractmethod
    def placed(
        self,
        parsed: ParsedPrompt,
        pictures: Sequence[LoadedPicture],
        encoding: Mapping[str, Any],
    ) -> PlacedPrompt:
        """The prompt as ids with its pictures' tokens, and the items there. `encoding`: arguments
        of the tokenizer. Raises RequestError where placeholders and pictures do not match.
        """

    @abstractmethod
    def expanded(self, pictures: Sequence[LoadedPicture]) -> list[ExpandedPicture]:
        """The tokens of each picture in a prompt. Raises RequestError for embeddings of pictures
        that stand in several places.
        """

    @abstractmethod
    def prompt_text(self, text: str, expanded: Sequence[ExpandedPicture]) -> str:
        """The text whose ids `widened` takes, "" where it takes none. Raises RequestError where
        there are more or fewer placeholders than pictures.
        """

    @abstractmethod
    def widened(
        self,
        short: Sequence[int],
        pictures: Sequence[LoadedPicture],
        expanded: Sequence[ExpandedPicture],
    ) -> PlacedPrompt:
        """The prompt whose expansions still have one token for every run of them. Raises
        RequestError for one that has others.
        """

    def _made_again(self, placed: Sequence[PlacedPicture]) -> dict[bytes, PictureSource]:
        found = {each.digest: self._remaker.source_of(each) for each in placed}
        return {digest: source for digest, source in found.items() if source is not None}


def item_of(placed: PlacedPicture, prefix: int = 0) -> MediaItem:
    """A picture as the engine takes it; `prefix`: see `MediaItem`."""
    return MediaItem(
        digest=placed.digest,
        modality=placed.modality,
        num_rows=placed.num_rows,
        places=placed.places,
        inputs=dict(placed.inputs),
        is_bidirectional=placed.is_bidirectional,
        prefix=prefix,
    )


def _given(media: GivenMedia, rows: RowsReader | None) -> list[Any]:
    for name in (*media.data, *media.uuids):
        if name != IMAGE:
            raise RequestError(f"Unsupported modality: {name}", parameter="multi_modal_data")
    uuids = media.uuids.get(IMAGE)
    data = media.data.get(IMAGE)
    if data is None and isinstance(uuids, list | tuple):
        data = [None] * len(uuids)
    if isinstance(data, list) and data and isinstance(data[0], GivenPicture):
        return data  # out of a chat
    found: list[Any] = given_pictures(data, uuids, rows)
    return found


def _least_count(messages: Any) -> int:
    """The number of parts of messages that are pictures by their type."""
    if not isinstance(messages, list | tuple):
        return 0
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(isinstance(part, dict) and part.get("type") in PICTURE_TYPES for part in parts)


def _taken_out(messages: Any) -> tuple[Any, list[GivenPicture]]:
    """The messages with markers in place of pictures, and these in order."""
    found: list[GivenPicture] = []
    if not isinstance(messages, list | tuple):
        return messages, found
    texts: list[Any] = []
    shown: list[Any] = []  # by tools: templates know no pictures in their results
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        is_of_tool = isinstance(message, Mapping) and message.get("role") == "tool"
        if shown and not is_of_tool:
            texts.append({"role": "user", "content": shown})
            shown = []
        if isinstance(content, list | tuple):
            parts = [_without_picture(part, found) for part in content]
            if is_of_tool and PICTURE in parts:
                shown += [part for part in parts if part == PICTURE]
                parts = [part for part in parts if part != PICTURE]
            message = {**message, "content": parts}
        texts.append(message)
    if shown:
        texts.append({"role": "user", "content": shown})
    return texts, found


def _without_picture(part: Any, found: list[GivenPicture]) -> Any:
    """A part of a message; a marker for a picture, which is added to those that were found."""
    given = picture_of_part(part, len(found)) if isinstance(part, Mapping) else None
    if given is None:
        return part
    found.append(given)
    return dict(PICTURE)
