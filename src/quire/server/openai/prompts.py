"""Makes the prompts of the engine from texts, ids and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from quire.errors import InvalidParameter, PromptTooLong
from quire.media.chat_text import PicturesAsText
from quire.server.context import Server
from quire.server.http.failures import Refusal
from quire.server.openai.requests import ChatRequest, GenerationFields
from quire.text.templates.template_bounds import MAX_CHARACTERS


class MediaOptions(Protocol):
    """The options of a body for decoding and processing its media."""

    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None


_OF_ANY = 2
"""Weight of a value of any kind: the characters that take as much work."""


async def prompt_ids(
    server: Server,
    prompt: str | list[int],
    body: GenerationFields,
    *,
    add_special_tokens: bool,
    limit: int | None,
) -> list[int]:
    """Return the prompt's ids, truncated by `truncate_prompt_tokens`; the special tokens before a
    text stay, as with tokenizers' own truncation. Without it, a text of `limit` tokens or more
    (None: no text) may be refused. Raises RequestError or Refusal.
    """
    is_cut = body.truncate_prompt_tokens is not None
    num_kept = 0
    if isinstance(prompt, str):
        most, special = None if is_cut else limit, add_special_tokens
        ids = await text_ids(server, prompt, add_special_tokens=special, limit=most)
        if is_cut and add_special_tokens:
            num_kept = _num_equal(ids, server.need_tokenizer().encode(""))
    else:
        ids = prompt
    return _truncated(ids, num_kept, body, server.limits.max_model_len)


async def text_ids(
    server: Server, text: str, *, add_special_tokens: bool, limit: int | None
) -> list[int]:
    """Return the ids of a text; see `LongTexts.ids`. One that begins with the BOS token's text gets
    no second BOS: it is what a client made of ids, and a second one would change every probability.
    """
    tokenizer = server.need_tokenizer()
    ids = await server.need_texts().ids(text, add_special_tokens=add_special_tokens, limit=limit)
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    is_doubled = bos is not None and text.startswith(bos) and ids[:2] == [bos_id, bos_id]
    is_wanted = bos is not None and text.startswith(bos + bos)
    return ids[1:] if add_special_tokens and is_doubled and not is_wanted else ids


def _num_equal(ids: list[int], others: list[int]) -> int:
    """Number of equal ids at the beginning."""
    pairs = zip(ids, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _truncated(
    ids: list[int], num_kept: int, body: GenerationFields, max_model_len: int
) -> list[int]:
    """The last ids after the first `num_kept`, or the first ones (`truncation_side`)."""
    asked = body.truncate_prompt_tokens
    if asked is None:
        return ids
    if asked < -1 or asked > max_model_len:
        allowed = f"it must be -1 or lie between 0 and {max_model_len}"
        raise InvalidParameter("truncate_prompt_tokens", asked, allowed)
    # one token less: the answer needs room
    room = max_model_len - 1 if asked == -1 else asked
    if body.truncation_side == "right" or len(ids) <= room:
        return ids[:room]
    kept = ids[: min(num_kept, room)]
    return kept + ids[len(ids) - (room - len(kept)) :]


def check_template(server: Server, template: str | None) -> None:
    """Raise Refusal (400) for a request's own template where it is not trusted."""
    if template is not None and not server.chat.trusts_requests:
        text = "This server takes no chat template from a request (--trust-request-chat-template)."
        raise Refusal(400, text, param="chat_template")


def check_media_options(server: Server, body: MediaOptions) -> None:
    """Raise Refusal (400) for options of media in a request that is not trusted with them."""
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(body, name) and not server.chat.trusts_media_options:
            text = f"This server takes no {name} from a request (--trust-request-mm-kwargs)."
            raise Refusal(400, text, param=name)


async def render(
    server: Server,
    body: ChatRequest,
    tools: Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Any],
    join_pictures: PicturesAsText | None = None,
) -> str:
    """Render the messages of a conversation with the chat template; with `join_pictures` they have
    markers for pictures. Raises RequestError or Refusal.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    template = kwargs.pop("chat_template", None) or body.chat_template
    check_template(server, template)
    check_media_options(server, body)
    if body.enable_thinking is not None:
        kwargs.setdefault("enable_thinking", body.enable_thinking)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        # templates read one of the two names, and one that they do not read does nothing
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.documents is not None:
        kwargs["documents"] = body.documents
    options = {
        "chat_template": template or server.chat.template,
        "content_format": server.chat.content_format,
        "add_generation_prompt": body.opens_answer,
        "continue_final_message": bool(body.continue_final_message),
        "tools": tools,
        "tools_as_text": server.chat.parser_plan.tools_as_text,
        "chat_template_kwargs": {**server.chat.default_kwargs, **kwargs},
    }
    # what the template can repeat or search in, whatever part of the prompt it becomes
    size = size_of([messages, tools, kwargs], most=MAX_CHARACTERS)
    return await server.need_texts().rendered(
        messages,
        options,
        size=size,
        # a template of a request may loop, so it is never rendered in this process
        is_trusted=template is None,
        join_pictures=join_pictures,
    )


def output_budget(
    asked: int | None, name: str, defaults: Mapping[str, Any], prompt_len: int, max_model_len: int
) -> int:
    """Return how many tokens may be generated: as many as are asked for, fit, and are the model's
    default, since agents ask for fixed numbers.

    Raises InvalidParameter, ContextLengthExceeded.
    """
    room = max_model_len - prompt_len
    if room <= 0:
        raise PromptTooLong(prompt_len, max_model_len)
    if asked is not None and asked < 1:
        raise InvalidParameter(name, asked, "max_tokens must be at least 1")
    bounds = (asked, defaults.get("max_tokens"), room)
    return min(bound for bound in bounds if bound is not None)


def size_of(value: object, *, most: int) -> int:
    """Size of a JSON value: its texts' characters, and some for the rest; ends above `most`."""
    size, waiting = 0, [value]
    # a stack of its own: the depth of a body must not reach the interpreter's limit
    while waiting and size <= most:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            waiting += item
        size += _OF_ANY
    return size
