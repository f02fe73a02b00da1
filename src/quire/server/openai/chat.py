"""Step 1 of 8 on a request's path (`POST /v1/chat/completions`): JSON becomes a prompt with its
parameters, or an error that names the field.

In: a conversation. Out: token ids and `SamplingParams`; later deltas, or a whole reply. Next:
engine/frontend/input_processor.py, behind `AsyncLLM.add_request`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.server.context import RequestName, Server
from quire.server.openai.delivery import deliver
from quire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.server.openai.parsed_chat import (
    ChatPrompt,
    answer_form,
    begin_at,
    is_empty,
    needs_special_tokens,
    open_answers,
    tool_use,
)
from quire.server.openai.prompts import output_budget, prompt_ids, render
from quire.server.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
)
from quire.server.openai.requests import ChatRequest
from quire.server.openai.usage import UsageCounter
from quire.server.output_parsing import ToolUse


async def chat_completions(server: Server, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read(request, ChatRequest)
    server.check_model(body.model)
    prompt = await chat_prompt(server, body)
    name = RequestName.of(request, "chatcmpl-", body.request_id)
    reply = ChatWriter(server, body, name, prompt)
    return await deliver(server, request, body, name, [prompt], reply)


async def chat_prompt(server: Server, body: ChatRequest) -> ChatPrompt:
    """The prompt that a conversation becomes. Raises RequestError or Refusal."""
    body.check()
    body.check_amounts(server.limits)
    tools = tool_use(server, body)
    text = await render(server, body, tools.in_prompt)
    ids = await prompt_ids(server, text, body, add_special_tokens=bool(body.add_special_tokens))
    place = begin_at(server, body, text)
    return ChatPrompt(text, ids, _params(server, body, len(ids), tools, place), tools, place)


def _params(
    server: Server, body: ChatRequest, prompt_len: int, tools: ToolUse, place: str
) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = output_budget(
        getattr(body, name), name, server.sampling_defaults, prompt_len, server.limits.max_model_len
    )
    params = body.sampling_params(
        server.sampling_defaults, max_tokens=budget, logprobs=body.num_logprobs
    )
    if needs_special_tokens(server, tools):
        params.skip_special_tokens = False
    params.structured_outputs = answer_form(server, params.structured_outputs, tools, place)
    if body.echo and params.prompt_logprobs is None and body.top_logprobs:
        params.prompt_logprobs = body.top_logprobs
    return params


class ChatWriter:
    """Makes the reply of one conversation, whole or chunk by chunk."""

    def __init__(
        self, server: Server, body: ChatRequest, name: RequestName, prompt: ChatPrompt
    ) -> None:
        self._server, self._body, self._prompt = server, body, prompt
        self._head: dict[str, Any] = {
            "id": name.shown,
            "created": name.created,
            "model": server.names[0],
        }
        self._usage = UsageCounter([len(prompt.ids)], shows_cached=server.replies.prompt_details)
        own = body.return_tokens_as_token_ids
        self._as_ids = server.replies.tokens_as_ids if own is None else own
        role = server.chat.response_role
        last = body.messages[-1]
        if body.opens_answer is False and isinstance(last.get("role"), str):
            role = last["role"]
        self._role = role
        self._echoed = _text_of(last) if body.echo and last.get("role") == role else ""
        self._answers = open_answers(server, body, prompt, role)
        # Tokens would tell the reasoning that is to be left out.
        self._hides_tokens = (
            body.include_reasoning is False and server.chat.parser_plan.reasoning is not None
        )
        self._shows_ids = bool(body.return_token_ids) and not self._hides_tokens
        self._has_begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatReply:
        [output] = outputs
        self._usage.take(0, output)
        choices = [self._choice(completion) for completion in output.outputs]
        self._count_reasoning()
        return ChatReply(
            **self._head,
            choices=choices,
            usage=self._usage.whole(),
            system_fingerprint=self._server.replies.fingerprint,
            prompt_logprobs=output.prompt_logprobs and prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=self._prompt.ids if self._body.return_token_ids else None,
            prompt_text=self._prompt.text if self._body.return_prompt_text else None,
        )

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[ChatChunk]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._openings()
        self._usage.take(prompt, output)
        for completion in output.outputs:
            yield from self._news(completion)

    def last(self) -> ChatChunk | None:
        if not self._shows_usage():
            return None
        self._count_reasoning()
        last = ChatChunk(**self._head, choices=[], usage=self._usage.streamed())
        last.system_fingerprint = self._server.replies.fingerprint or UNSET
        return last

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
        )

    def _openings(self) -> Iterable[ChatChunk]:
        """The chunks that say whose words follow, one for each answer."""
        for index in range(len(self._answers)):
            first = self._chunk(index, ChatDelta(role=self._role, content=""))
            if self._body.return_token_ids:
                first.prompt_token_ids = self._prompt.ids
            if self._body.return_prompt_text:
                first.prompt_text = self._prompt.text
            yield first
            if self._echoed:
                yield self._chunk(index, ChatDelta(content=self._echoed))

    def _news(self, completion: CompletionOutput) -> Iterable[ChatChunk]:
        """The chunk of one delta, if it says anything."""
        answer, is_last = self._answers[completion.index], completion.finish_reason is not None
        delta = answer.delta(completion.text, is_last=is_last)
        logprobs = self._logprobs(completion)
        if is_empty(delta):
            if not (is_last or logprobs or self._shows_ids or self._sends_blanks):
                return
            delta.content = ""
        chunk = self._chunk(completion.index, delta)
        [choice] = chunk.choices
        choice.logprobs = logprobs
        if self._shows_ids:
            choice.token_ids = list(completion.token_ids)
        if is_last:
            choice.finish_reason = answer.finish_reason(completion.finish_reason)
            choice.stop_reason = completion.stop_reason
            if not self._shows_usage():
                chunk.system_fingerprint = self._server.replies.fingerprint or UNSET
        yield chunk

    def _chunk(self, index: int, delta: ChatDelta) -> ChatChunk:
        chunk = ChatChunk(**self._head, choices=[ChatChunkChoice(index, delta)])
        options = self._body.stream_options
        if self._shows_usage() and options and options.continuous_usage_stats:
            chunk.usage = self._usage.of_choice(0, index)
        return chunk

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self._hides_tokens or not self._body.logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.logprobs,
            completion.token_ids,
            self._body.top_logprobs or 0,
            as_ids=self._as_ids,
        )

    def _count_reasoning(self) -> None:
        """Tokens of the reasoning, by its text: the marks around it are not counted."""
        if self._server.chat.parser_plan.reasoning is not None:
            encode = self._server.need_tokenizer().encode
            texts = [answer.reasoning for answer in self._answers]
            self._usage.reasoning_tokens = sum(
                len(encode(text, add_special_tokens=False)) for text in texts
            )

    @property
    def _sends_blanks(self) -> bool:
        """Without anything to take apart, a delta whose text is held back is sent all the same."""
        plan = self._server.chat.parser_plan
        return plan.tool_format is None and plan.reasoning is None

    def _shows_usage(self) -> bool:
        options = self._body.stream_options
        return self._server.replies.forces_usage or bool(options and options.include_usage)


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
