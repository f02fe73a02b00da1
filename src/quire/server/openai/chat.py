"""Step 1 of 8 on a request's path (`POST /v1/chat/completions`): JSON becomes a prompt with its
parameters, or an error that names the field.

In: a conversation. Out: token ids and `SamplingParams`; later deltas, or a whole reply. Next:
engine/frontend/input_processor.py, through `AsyncLLM.add_request`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.wire.prompt_media import PromptMedia
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.server.context import RequestName, Server
from quire.server.openai.delivery import ReplyWriter, deliver, experts_file
from quire.server.openai.embeds import embedded_chat, placed_embeds, refuse_together
from quire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.server.openai.parsed_answer import ParsedAnswer
from quire.server.openai.parsed_chat import (
    ChatPrompt,
    adapt_params,
    open_answers,
    place_of,
    tool_use,
)
from quire.server.openai.prompts import output_budget, prompt_ids, render, text_ids
from quire.server.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    Usage,
)
from quire.server.openai.requests import ChatRequest
from quire.server.output_parsing import NO_TOOLS, ToolUse
from quire.server.pictures import ChatPictures


async def chat_completions(server: Server, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read_for_model(request, ChatRequest, has_one_prompt=True)
    prompt = await chat_prompt(server, request, body)
    name = RequestName.of(request, "chatcmpl-", body.request_id)
    reply = ChatWriter(server, body, name, prompt)
    return await deliver(server, request, body, name, [prompt], reply)


async def chat_prompt(server: Server, request: Request, body: ChatRequest) -> ChatPrompt:
    """Return the prompt of a conversation. Raises RequestError or Refusal."""
    body.check()
    body.check_amounts(server.limits)
    limit = server.limits.max_model_len
    text, ids, tools, media = await render_conversation(server, request, body, limit=limit)
    is_parsed = server.chat.parser_plan.is_needed or tools.tools is not None
    params = _params(server, body, len(ids))
    if not is_parsed:
        return ChatPrompt(text, ids, params, media)
    place = adapt_params(server, params, tools, place_of(server, body, text))
    return ChatPrompt(text, ids, params, media, tools, place)


class RenderedChat(NamedTuple):
    """A conversation as a prompt, how it uses tools, and its media among the ids."""

    text: str
    ids: list[int]
    tools: ToolUse
    media: PromptMedia | None = None


async def render_conversation(
    server: Server, request: Request, body: ChatRequest, *, limit: int | None
) -> RenderedChat:
    """Render a conversation. `limit`: from how many tokens on it may be refused; None: never.
    Raises RequestError or Refusal.
    """
    tools = tool_use(server, body) if body.has_tools else NO_TOOLS
    special = bool(body.add_special_tokens)
    takes_embeds = server.engine.front_end.inputs.embeds is not None
    chat = await embedded_chat(server, body.messages) if takes_embeds else None
    if chat is not None:
        refuse_together(body)
        text = await render(server, body, tools.in_prompt, chat.messages)
        pieces = chat.pieces(text)
        read = [
            await prompt_ids(server, piece, body, add_special_tokens=special and not n, limit=limit)
            # special tokens stand before the whole conversation, not before each piece
            for n, piece in enumerate(pieces)
        ]
        ids, media = await placed_embeds(chat, read, limit=limit)
        return RenderedChat("".join(pieces), ids, tools, media)
    takes = server.engine.front_end.inputs.pictures
    pictures = None if takes is None else ChatPictures.of(server, request, body, takes)
    if pictures is not None:
        text = await render(
            server, body, tools.in_prompt, pictures.messages, pictures.prompts.as_text
        )
        encode = partial(text_ids, server, add_special_tokens=special, limit=limit)
        placed = await pictures.placed(text, encode, limit=limit)
        return RenderedChat(text, placed.token_ids, tools, placed.media)
    text = await render(server, body, tools.in_prompt, body.messages)
    ids = await prompt_ids(server, text, body, add_special_tokens=special, limit=limit)
    return RenderedChat(text, ids, tools)


def _params(server: Server, body: ChatRequest, prompt_len: int) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = output_budget(
        getattr(body, name), name, server.sampling_defaults, prompt_len, server.limits.max_model_len
    )
    params = body.sampling_params(
        server.sampling_defaults, max_tokens=budget, logprobs=body.num_logprobs
    )
    if body.echo and params.prompt_logprobs is None and body.top_logprobs:
        params.prompt_logprobs = body.top_logprobs
    return params


class PlainAnswer:
    """One of n answers that need no parser: the text is the content."""

    reasoning = ""
    holds_back = False
    is_call = False

    def __init__(self, role: str) -> None:
        self._role = role

    def delta(self, text: str, *, is_last: bool) -> ChatDelta:
        """Return what the next piece of text adds."""
        return ChatDelta(content=text) if text else ChatDelta()

    def message(self, text: str) -> ChatMessage:
        return ChatMessage(self._role, text)

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason."""
        return reason


class ChatWriter(ReplyWriter):
    """Makes the reply of one conversation, whole or chunk by chunk."""

    chunk_type = ChatChunk

    def __init__(
        self, server: Server, body: ChatRequest, name: RequestName, prompt: ChatPrompt
    ) -> None:
        super().__init__(server, body, name, [prompt])
        self._body, self._prompt = body, prompt
        self._plan = server.chat.parser_plan
        role = server.chat.response_role
        last = body.messages[-1]
        if body.opens_answer is False and isinstance(last.get("role"), str):
            role = last["role"]
        self._role = role
        self._echoed = _text_of(last) if body.echo and last.get("role") == role else ""
        self._answers: Sequence[PlainAnswer | ParsedAnswer]
        if prompt.place is None:
            self._answers = [PlainAnswer(role) for _ in range(body.n or 1)]
        else:
            self._answers = open_answers(server, body, prompt, role)
        # Tokens would show the reasoning that is to be left out.
        self._hides_tokens = body.include_reasoning is False and self._plan.reasoning is not None
        self._shows_ids = bool(body.return_token_ids) and not self._hides_tokens
        asked = body.logprob_token_ids
        self._asked_ids = None if asked is None else frozenset(asked)
        self._has_begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatReply:
        [output] = outputs
        self.usage.add(0, output)
        choices = [self._choice(completion) for completion in output.outputs]
        self._count_reasoning()
        return ChatReply(
            **self.head,
            choices=choices,
            usage=self.usage.total(Usage),
            system_fingerprint=self.server.replies.fingerprint,
            metrics=self.usage.metrics,
            kv_transfer_params=output.kv_transfer_params,
            prompt_logprobs=output.prompt_logprobs and prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=self._prompt.ids if self._body.return_token_ids else None,
            prompt_text=self._prompt.text if self._body.return_prompt_text else None,
        )

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[ChatChunk]:
        if not self._has_begun:
            self._has_begun = True
            # before any output is read: clients take the role from the first chunk of each choice
            yield from self._openings()
        self.usage.add(prompt, output)
        for completion in output.outputs:
            if (choice := self._choice_delta(completion)) is not None:
                is_last = completion.finish_reason is not None
                yield self.chunk(0, completion.index, choice, is_last=is_last)

    def last(self) -> Struct | None:
        if self.shows_usage:
            self._count_reasoning()
        return super().last()

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        answer = self._answers[completion.index]
        message = answer.message(completion.text)
        if self._echoed:
            message.content = self._echoed + (message.content or "")
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=answer.finish_reason(completion.finish_reason),
            stop_reason=completion.stop_reason,
            token_ids=list(completion.token_ids) if self._shows_ids else None,
            routed_experts=experts_file(completion),
        )

    def _openings(self) -> Iterable[ChatChunk]:
        """The first chunks, with the role, one for each answer."""
        for index in range(len(self._answers)):
            delta = ChatDelta(role=self._role, content="")
            first = self.chunk(0, index, ChatChunkChoice(index, delta))
            if self._body.return_token_ids:
                first.prompt_token_ids = self._prompt.ids
            if self._body.return_prompt_text:
                first.prompt_text = self._prompt.text
            yield first
            if self._echoed:
                yield self.chunk(0, index, ChatChunkChoice(index, ChatDelta(content=self._echoed)))

    def _choice_delta(self, completion: CompletionOutput) -> ChatChunkChoice | None:
        """Return what a delta adds to its answer; None if nothing is to be sent."""
        answer, is_last = self._answers[completion.index], completion.finish_reason is not None
        delta = answer.delta(completion.text, is_last=is_last)
        logprobs = self._logprobs(completion)
        if delta == ChatDelta():
            # a chunk with nothing in it would only cost bytes; logprobs and ids come with their
            # step
            if answer.holds_back and not (is_last or logprobs or self._shows_ids):
                return None
            if not answer.is_call:
                delta.content = ""
        choice = ChatChunkChoice(completion.index, delta, logprobs)
        if self._shows_ids:
            choice.token_ids = list(completion.token_ids)
        if is_last:
            choice.finish_reason = answer.finish_reason(completion.finish_reason)
            choice.stop_reason = completion.stop_reason
        return choice

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self._hides_tokens or not self._body.logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.logprobs,
            completion.token_ids,
            self._body.top_logprobs or 0,
            self.server.need_tokenizer(),
            asked_ids=self._asked_ids,
            as_ids=self.shows_tokens_as_ids,
        )

    def _count_reasoning(self) -> None:
        """Count the tokens of the reasoning by its text, without the delimiters around it."""
        if self._plan.reasoning is not None:
            encode = self.server.need_tokenizer().encode
            texts = [answer.reasoning for answer in self._answers]
            self.usage.reasoning_tokens = sum(
                len(encode(text, add_special_tokens=False)) for text in texts
            )


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
