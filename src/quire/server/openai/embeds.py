"""Prompts of requests that are embeddings, or have some: `prompt_embeds`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.errors import InvalidParameter, PromptTooLong
from quire.server.context import Server
from quire.server.long_texts import off_loop
from quire.server.openai.requests import CompletionRequest, GenerationFields

if TYPE_CHECKING:  # few requests have some
    from quire.engine.frontend.embeds.chat import EmbeddedChat
    from quire.engine.wire.prompt_media import PromptMedia

NAME = "prompt_embeds"


async def given_embeds(
    server: Server, body: CompletionRequest
) -> list[tuple[list[int], PromptMedia]]:
    """The prompts of a request to complete that are embeddings: placeholders, and what stands
    there. Raises RequestErrors, before anything is decoded for an engine that takes none.
    """
    given = body.prompt_embeds
    if not body.num_embedded or given is None:  # an empty list is none
        return []
    width = server.engine.front_end.inputs.require_embeds().width
    refuse_together(body)
    if body.echo:
        raise InvalidParameter("echo", True, "a prompt of embeddings has no text")
    texts: Sequence[str] = [given] if isinstance(given, str) else given
    names = [NAME] if isinstance(given, str) else [f"{NAME}[{n}]" for n in range(len(texts))]
    return [
        await off_loop(len(text), _decoded, name, text, width)
        for name, text in zip(names, texts, strict=True)
    ]


async def placed_embeds(
    chat: EmbeddedChat, pieces: Sequence[Sequence[int]], *, limit: int | None
) -> tuple[list[int], PromptMedia]:
    """The conversation of these pieces of text as ids, and the embeddings among them. Raises
    PromptTooLong for `limit` tokens and more, before memory is taken for them.
    """
    num_tokens = chat.num_tokens(pieces)
    if limit is not None and num_tokens >= limit:
        raise PromptTooLong(num_tokens, limit)
    # weighed as a long text: the rows of tensors are put together
    return await off_loop(2**20, _placed, chat, pieces)


def _placed(chat: EmbeddedChat, pieces: Sequence[Sequence[int]]) -> tuple[list[int], PromptMedia]:
    made = chat.prompt(pieces)
    return made.ids, made.media()


def _decoded(name: str, text: str, width: int) -> tuple[list[int], PromptMedia]:
    from quire.engine.frontend.embeds.prompts import PLACEHOLDER, media_of
    from quire.media.tensors import checked_rows, tensor_of_text

    rows = checked_rows(tensor_of_text(name, text), name, width)
    return [PLACEHOLDER] * len(rows), media_of(rows)


async def embedded_chat(server: Server, messages: Sequence[object]) -> EmbeddedChat | None:
    """A conversation with embeddings among its texts, or None. Raises RequestErrors."""
    from quire.engine.frontend.embeds.chat import EmbeddedChat, has_embeds

    if not has_embeds(messages):
        return None
    width = server.engine.front_end.inputs.require_embeds().width
    return await off_loop(2**20, EmbeddedChat, messages, width)


def refuse_together(body: GenerationFields) -> None:
    """Raise InvalidParameter for fields that read the tokens of a prompt."""
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        if getattr(body, name) is not None:
            allowed = "a prompt of embeddings has no tokens for it"
            raise InvalidParameter(name, getattr(body, name), allowed)
    if body.use_beam_search:
        raise InvalidParameter("use_beam_search", True, "the prompt is made of embeddings")
