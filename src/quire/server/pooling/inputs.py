"""Makes the engine's prompts of the inputs of a request that pools."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request

from quire.engine.frontend.pooling_input import (
    TRUNCATE,
    PoolingFacts,
    Truncation,
    padded,
    take_truncation,
)
from quire.engine.frontend.score_prompts import (
    Content,
    ScoredText,
    check_uncut,
    has_document_first,
)
from quire.engine.wire.prompt_media import PlacedPrompt, PromptMedia
from quire.errors import InvalidParameter, PromptTooLong, RequestError
from quire.params import PoolingParams
from quire.params.pooling import SECOND_TEXT
from quire.server.context import Server
from quire.server.openai.prompts import check_media_options, check_template, render, size_of
from quire.server.openai.requests import ChatRequest
from quire.server.pictures import ChatPictures, PromptPictures
from quire.server.pooling.requests import InputFields, Item, PairFields, PooledBody
from quire.server.text_process import PairTask
from quire.text.templates.template_bounds import MAX_CHARACTERS

if TYPE_CHECKING:  # few models take pictures
    from quire.media.fetch.fetcher import GivenPicture
    from quire.media.loader import LoadedPicture


_OF_PICTURES = ("image", "image_embeds")
"""The engine's names for the pictures of a prompt, which do not say of which input."""


class PoolingPrompt(NamedTuple):
    """Token ids with media, what to make of them, and `place`, the input ("": the only one)."""

    ids: list[int]
    params: PoolingParams
    place: str
    media: PromptMedia | None = None


class ReadInput(NamedTuple):
    """The token ids of one input, and its media among them."""

    ids: list[int]
    media: PromptMedia | None = None


@dataclass(frozen=True)
class InputReader:
    """Tokenizes a request's texts, of at most `limit` tokens (None: any), the limit of `bound`."""

    server: Server
    request: Request
    body: PooledBody
    facts: PoolingFacts
    cut: Truncation | None
    limit: int | None
    bound: str = "max_model_len"

    @classmethod
    def of(cls, server: Server, request: Request, body: PooledBody) -> InputReader:
        """The reader of a request, for prompts that the model takes. Raises InvalidParameter."""
        max_model_len = server.limits.max_model_len
        side = "right" if server.tokenizer is None else server.tokenizer.truncation_side
        given = body.truncation
        if server.pooling.cuts:
            # the request's own wish, even the wish for no cut, comes after the operator's
            given = {TRUNCATE: -1, **given}
        _, cut = take_truncation(given, max_model_len, side)
        return cls(server, request, body, server.abilities.facts, cut, max_model_len)

    async def ids(self, text: str, *, add_special_tokens: bool, most_read: int = 0) -> list[int]:
        """Ids of a text, of which at most `most_read` are read (0: all). Raises RequestError."""
        texts, limit = self.server.need_texts(), self.limit
        try:
            ids = await texts.ids(
                text.lower() if self.facts.lowers_input else text,
                add_special_tokens=add_special_tokens,
                # a text that is cut may be of any length
                limit=None if limit is None or self.cut or most_read else limit + 1,
                cut=self.cut,
                most_read=most_read,
            )
        except PromptTooLong as error:  # a prompt may be as long as the limit
            raise self._too_long(error.num_tokens, is_estimate=True) from None
        # a pooler would have nothing to pool
        if not ids:
            raise InvalidParameter("prompt", text, "it must have at least one token")
        if self.body.is_padded:
            length = self.server.limits.max_model_len if self.cut is None else self.cut.limit
            ids = padded(ids, length, self.server.need_tokenizer())
        return self.checked(ids)

    def checked(self, ids: list[int]) -> list[int]:
        """The ids. Raises PromptTooLong."""
        if self.limit is not None and len(ids) > self.limit:
            raise self._too_long(len(ids))
        return ids

    async def with_pictures(
        self, pictures: PromptPictures, text: str, *, add_special_tokens: bool
    ) -> ReadInput:
        """The ids of a text with placeholders, and its pictures. Raises RequestError."""
        encode = partial(self.ids, add_special_tokens=add_special_tokens)
        return await self._placed(partial(pictures.placed, text, encode))

    async def with_pictures_in_ids(self, pictures: PromptPictures, ids: list[int]) -> ReadInput:
        """As `with_pictures`, of ids with placeholders."""
        return await self._placed(partial(pictures.placed_in_ids, ids))

    async def _placed(self, place: Callable[..., Awaitable[PlacedPrompt]]) -> ReadInput:
        """Pictures put into a prompt, which is never cut."""
        if (most := self.body.truncation.get(TRUNCATE, -1)) != -1:
            raise InvalidParameter(TRUNCATE, most, "a prompt with pictures is not cut")
        check_media_options(self.server, self.body)
        try:
            placed = await place(limit=None if self.limit is None else self.limit + 1)
        except PromptTooLong as error:
            raise self._too_long(error.num_tokens, is_estimate=True) from None
        return ReadInput(self.checked(placed.token_ids), placed.media)

    def text_with_pictures(self, content: Content) -> tuple[str, list[GivenPicture]]:
        """The text of a content with placeholders, and its pictures. Raises RequestError."""
        return self.server.engine.front_end.inputs.require_pictures().content(content.parts)

    def pictures_of(
        self, given: list[GivenPicture], known: Sequence[LoadedPicture] = ()
    ) -> PromptPictures:
        """A prompt's pictures before they are fetched, but for the first where these are known."""
        prompts = self.server.engine.front_end.inputs.require_pictures()
        return PromptPictures(self.request, self.body, prompts, given, known)

    def _too_long(self, num_tokens: int, *, is_estimate: bool = False) -> PromptTooLong:
        return PromptTooLong(
            num_tokens,
            self.limit or 0,
            is_estimate=is_estimate,
            has_output=False,
            bound=self.bound,
        )


async def read_item(reader: InputReader, body: InputFields, item: Item) -> ReadInput:
    """One input as ids. Raises RequestError or Refusal."""
    special = body.add_special_tokens
    if isinstance(item, str):
        return ReadInput(await reader.ids(item, add_special_tokens=special is not False))
    if isinstance(item[0], dict):
        return await _read_chat(reader, body.as_chat(item), bool(special))  # type: ignore[arg-type]
    ids: list[int] = item  # type: ignore[assignment]
    return ReadInput(reader.checked(ids if reader.cut is None else reader.cut.of(ids)))


async def _read_chat(reader: InputReader, chat: ChatRequest, special: bool) -> ReadInput:
    server, prompts = reader.server, reader.server.engine.front_end.inputs.pictures
    pictures = None
    if prompts is not None:
        pictures = ChatPictures.found(reader.request, reader.body, prompts, chat.messages)
    if pictures is None:
        text = await render(server, chat, None, chat.messages)
        return ReadInput(await reader.ids(text, add_special_tokens=special))
    if pictures.prompts.needs_template:
        text = await render(server, chat, None, pictures.messages, pictures.prompts.as_text)
    else:
        parts = [part for message in pictures.messages for part in _parts_of(message)]
        text = pictures.prompts.text_of(parts)
    return await reader.with_pictures(pictures, text, add_special_tokens=special)


def _parts_of(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [content] if content else []


@contextmanager
def naming(body: PooledBody, place: str, *, has_pictures: bool = True) -> Iterator[None]:
    """Let an error about an input name its place; "": the field that has it. has_pictures: pictures
    are those of this input, so that one of several inputs is named for them, too.
    """
    try:
        yield
    except RequestError as error:
        parameter = error.parameter
        # a picture of a query cannot be told from those of its document
        is_of_picture = has_pictures and parameter in _OF_PICTURES and place.endswith("]")
        if place and parameter and (is_of_picture or body.field_of(parameter) == body.INPUT):
            error.parameter = place
        raise


def _place(field: str, index: int, num: int) -> str:
    return f"{field}[{index}]" if num > 1 else field


async def prompts_of(
    reader: InputReader,
    body: InputFields,
    items: Sequence[Item],
    params: PoolingParams,
    field: str = "",
) -> AsyncGenerator[PoolingPrompt]:
    """The prompts of the inputs, made when they are needed. `field` has them; "": the body's."""
    for index, item in enumerate(items):
        place = _place(field or body.INPUT, index, len(items))
        with naming(body, place):
            read = await read_item(reader, body, item)
        yield PoolingPrompt(read.ids, params, place, read.media)


async def texts_apart(
    reader: InputReader,
    body: PairFields,
    texts: Sequence[ScoredText],
    params: Sequence[PoolingParams],
    side: int,
    places: range,
) -> AsyncGenerator[PoolingPrompt]:
    """The prompts of texts that are pooled by themselves: of the first side of pairs, or the second
    (`side` 1). `params`: one for all, or one each; `places`: those of the texts on their side.
    """
    most_read, field = tuple(body.most_read().values())[side], body.names[side]
    for index, text in enumerate(texts):
        place = _place(field, places[index], places.stop)
        with naming(body, place):
            if isinstance(text, Content):
                read = await _read_content(reader, text, most_read)
            else:
                ids = await reader.ids(text, add_special_tokens=True, most_read=most_read)
                read = ReadInput(ids)
        yield PoolingPrompt(read.ids, params[index if len(params) > 1 else 0], place, read.media)


async def _read_content(reader: InputReader, content: Content, most_read: int) -> ReadInput:
    """A text with pictures, without a template."""
    check_uncut(most_read)
    text, given = reader.text_with_pictures(content)
    return await reader.with_pictures(reader.pictures_of(given), text, add_special_tokens=True)


async def cross_prompts(
    server: Server,
    request: Request,
    body: PairFields,
    first: Sequence[ScoredText],
    second: Sequence[ScoredText],
) -> AsyncGenerator[PoolingPrompt]:
    """The prompts of a model that reads both texts of a pair at once."""
    reader, texts = InputReader.of(server, request, body), server.need_texts()
    check_template(server, body.chat_template)
    is_trusted = body.chat_template is None
    variables = {**server.chat.default_kwargs, **body.variables()}
    variables_size = size_of(variables, most=MAX_CHARACTERS)
    known: Sequence[LoadedPicture] = ()
    template = body.chat_template or server.chat.template
    turns = has_document_first(reader.facts, template)
    for index, document in enumerate(second):
        place = _place(body.names[1], index, len(second))
        query = first[index if len(first) > 1 else 0]
        named = partial(naming, body, place, has_pictures=not isinstance(query, Content))
        with named():
            sides, (of_query, of_document) = _sides(reader, body, query, document)
        task = PairTask(
            query=sides[0],
            document=sides[1],
            facts=reader.facts,
            max_model_len=server.limits.max_model_len,
            template=template,
            variables=variables,
            truncation=body.truncation,
            most_read=body.most_read(),
        )
        params = body.params("classify")
        with named():
            size = sum(map(len, sides)) + variables_size
            ids, second_at = await texts.pair(task, size=size, is_trusted=is_trusted)
            read = ReadInput(reader.checked(ids))
            given = [*of_document, *of_query] if turns else [*of_query, *of_document]
            if given:
                pictures = reader.pictures_of(given, known)
                read = await reader.with_pictures_in_ids(pictures, ids)
                if len(first) == 1 and not turns:  # the query's are those of all pairs
                    known = pictures.loaded[: len(of_query)]
        if second_at is not None:
            params.extra_kwargs = {SECOND_TEXT: second_at}
        yield PoolingPrompt(read.ids, params, place, read.media)


def _sides(
    reader: InputReader, body: PairFields, *sides: ScoredText
) -> tuple[list[str], list[list[GivenPicture]]]:
    """The texts of a pair, with placeholders for their pictures, and the pictures of each."""
    texts, found = [], []
    for side in sides:
        if isinstance(side, Content):
            check_uncut(max(body.most_read().values()))
            text, given = reader.text_with_pictures(side)
        else:
            text, given = side, []
        texts.append(text)
        found.append(given)
    return texts, found


def check_no_template(body: PairFields) -> None:
    """Raise InvalidParameter for what belongs to a model that reads both texts at once."""
    for name in ("instruction", "chat_template", "chat_template_kwargs"):
        if (value := getattr(body, name)) is not None:
            allowed = "this model reads each text by itself, without a template"
            raise InvalidParameter(name, value, allowed)
