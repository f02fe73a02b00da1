"""Makes the engine's prompts of the inputs of a request that pools."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.frontend.pooling_input import TRUNCATE, PoolingFacts, Truncation, take_truncation
from quire.errors import InvalidParameter, PromptTooLong, RequestError
from quire.params import PoolingParams
from quire.params.pooling import SECOND_TEXT
from quire.server.context import Server
from quire.server.openai.prompts import check_template, render, size_of
from quire.server.pooling.requests import InputFields, Item, PairFields, PooledBody
from quire.server.text_process import PairTask
from quire.text.templates.template_bounds import MAX_CHARACTERS


class PoolingPrompt(NamedTuple):
    """Token ids and what is to be made of them; `place`: of which input, "" for the only one."""

    ids: list[int]
    params: PoolingParams
    place: str


@dataclass(frozen=True)
class InputReader:
    """Tokenizes the texts of one request, whose prompts have at most `limit` tokens (None: any
    number), which is that of the parameter `bound`.
    """

    server: Server
    facts: PoolingFacts
    cut: Truncation | None
    limit: int | None
    bound: str = "max_model_len"

    @classmethod
    def of(cls, server: Server, body: PooledBody) -> InputReader:
        """For prompts that the model takes. Raises InvalidParameter."""
        max_model_len = server.limits.max_model_len
        side = "right" if server.tokenizer is None else server.tokenizer.truncation_side
        given = body.truncation
        if server.pooling.cuts:
            given = {TRUNCATE: -1, **given}
        _, cut = take_truncation(given, max_model_len, side)
        return cls(server, server.abilities.facts, cut, max_model_len)

    async def ids(self, text: str, *, add_special_tokens: bool, most_read: int = 0) -> list[int]:
        """The ids of a text, of which so many tokens are read (0: all). Raises RequestError."""
        texts, limit = self.server.need_texts(), self.limit
        try:
            ids = await texts.ids(
                text.lower() if self.facts.lowers_input else text,
                add_special_tokens=add_special_tokens,
                limit=None if limit is None or self.cut or most_read else limit + 1,
                cut=self.cut,
                most_read=most_read,
            )
        except PromptTooLong as error:  # a prompt may be as long as the limit
            raise self._too_long(error.num_tokens, is_estimate=True) from None
        if not ids:
            raise InvalidParameter("prompt", text, "it must have at least one token")
        return self.checked(ids)

    def checked(self, ids: list[int]) -> list[int]:
        """The ids. Raises PromptTooLong."""
        if self.limit is not None and len(ids) > self.limit:
            raise self._too_long(len(ids))
        return ids

    def _too_long(self, num_tokens: int, *, is_estimate: bool = False) -> PromptTooLong:
        return PromptTooLong(
            num_tokens,
            self.limit or 0,
            is_estimate=is_estimate,
            has_output=False,
            bound=self.bound,
        )


async def item_ids(reader: InputReader, body: InputFields, item: Item) -> list[int]:
    """The ids of one input. Raises RequestError or Refusal."""
    special = body.add_special_tokens
    if isinstance(item, str):
        return await reader.ids(item, add_special_tokens=special is not False)
    if isinstance(item[0], dict):
        chat = body.as_chat(item)  # type: ignore[arg-type]
        text = await render(reader.server, chat, None, chat.messages)
        return await reader.ids(text, add_special_tokens=bool(special))
    ids: list[int] = item  # type: ignore[assignment]
    return reader.checked(ids if reader.cut is None else reader.cut.of(ids))


@contextmanager
def naming(body: PooledBody, place: str) -> Iterator[None]:
    """Let an error about an input name its place; "": the field that has it."""
    try:
        yield
    except RequestError as error:
        if place and error.parameter and body.field_of(error.parameter) == body.INPUT:
            error.parameter = place
        raise


def _place(field: str, index: int, num: int) -> str:
    """Where one of so many inputs is."""
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
            ids = await item_ids(reader, body, item)
        yield PoolingPrompt(ids, params, place)


async def texts_apart(
    reader: InputReader,
    body: PairFields,
    texts: Sequence[str],
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
            ids = await reader.ids(text, add_special_tokens=True, most_read=most_read)
        yield PoolingPrompt(ids, params[index if len(params) > 1 else 0], place)


async def cross_prompts(
    server: Server, body: PairFields, first: Sequence[str], second: Sequence[str]
) -> AsyncGenerator[PoolingPrompt]:
    """The prompts of a model that reads both texts of a pair at once."""
    reader, texts = InputReader.of(server, body), server.need_texts()
    check_template(server, body.chat_template)
    is_trusted = body.chat_template is None
    variables = {**server.chat.default_kwargs, **body.variables()}
    variables_size = size_of(variables, most=MAX_CHARACTERS)
    for index, document in enumerate(second):
        place = _place(body.names[1], index, len(second))
        task = PairTask(
            query=first[index if len(first) > 1 else 0],
            document=document,
            facts=reader.facts,
            max_model_len=server.limits.max_model_len,
            template=body.chat_template or server.chat.template,
            variables=variables,
            truncation=body.truncation,
            most_read=body.most_read(),
        )
        params = body.params("classify")
        with naming(body, place):
            size = len(task.query) + len(document) + variables_size
            ids, second_at = await texts.pair(task, size=size, is_trusted=is_trusted)
            reader.checked(ids)
        if second_at is not None:
            params.extra_kwargs = {SECOND_TEXT: second_at}
        yield PoolingPrompt(ids, params, place)


def check_no_template(body: PairFields) -> None:
    """Raise InvalidParameter for what belongs to a model that reads both texts at once."""
    for name in ("instruction", "chat_template", "chat_template_kwargs"):
        if (value := getattr(body, name)) is not None:
            allowed = "this model reads each text by itself, without a template"
            raise InvalidParameter(name, value, allowed)
