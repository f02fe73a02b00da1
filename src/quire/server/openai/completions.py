"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.server.context import Prompt, RequestName, Server
from quire.server.openai.delivery import ReplyWriter, deliver, experts_file, num_logprobs
from quire.server.openai.embeds import given_embeds
from quire.server.openai.logprobs import completion_logprobs, prompt_logprobs
from quire.server.openai.prompts import output_budget, prompt_ids
from quire.server.openai.replies import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
)
from quire.server.openai.requests import CompletionRequest
from quire.server.openai.selection import best
from quire.server.openai.text_offsets import TextOffsets

DEFAULT_MAX_TOKENS = 16


async def completions(server: Server, request: Request) -> Response:
    """Continue one prompt or several."""
    body = await server.read_for_model(request, CompletionRequest)
    prompts = await completion_prompts(server, body)
    name = RequestName.of(request, "cmpl-", body.request_id)
    reply = _CompletionWriter(server, body, name, prompts)
    return await deliver(server, request, body, name, prompts, reply)


async def completion_prompts(
    server: Server, body: CompletionRequest, default_max_tokens: int | None = DEFAULT_MAX_TOKENS
) -> list[Prompt]:
    """The prompts of a request, with their parameters. Raises RequestError or Refusal."""
    body.check()
    given = body.prompts(server.limits.completions)
    body.check_amounts(server.limits, len(given) + body.num_embedded)
    special = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    for ids, media in await given_embeds(server, body):
        prompts.append(
            Prompt(None, ids, _params(server, body, len(ids), default_max_tokens), media)
        )
    for prompt in given:
        if prompts:
            await asyncio.sleep(0)  # many short texts take as long as one that is not
        ids = await prompt_ids(
            server, prompt, body, add_special_tokens=special, limit=server.limits.max_model_len
        )
        text = prompt if isinstance(prompt, str) else None
        prompts.append(Prompt(text, ids, _params(server, body, len(ids), default_max_tokens)))
    return prompts


def _params(
    server: Server, body: CompletionRequest, prompt_len: int, default: int | None
) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    given = getattr(body, name)
    asked = default if given is None else given
    # the engine draws at least one token, which the reply leaves out
    asked = 1 if _is_only_echo(body) else asked
    budget = output_budget(
        asked, name, server.sampling_defaults, prompt_len, server.limits.max_model_len
    )
    # completions are ranked by their logprobs; 0 lists none but the drawn token's
    logprobs = 0 if body.is_ranked and body.logprobs is None else body.logprobs
    params = body.sampling_params(server.sampling_defaults, max_tokens=budget, logprobs=logprobs)
    if body.echo and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


def _is_only_echo(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.max_tokens == 0


class _CompletionWriter(ReplyWriter):
    """Makes the reply of one request, whole or chunk by chunk."""

    chunk_type = CompletionChunk

    def __init__(
        self, server: Server, body: CompletionRequest, name: RequestName, prompts: list[Prompt]
    ) -> None:
        super().__init__(server, body, name, prompts)
        self._body, self._prompts = body, prompts
        self._begun: set[int] = set()
        self._offsets: dict[int, TextOffsets] = {}
        self._sent: dict[int, int] = {}
        self._wants_logprobs = body.logprobs is not None or body.logprob_token_ids is not None
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self._echoed_logprobs: dict[int, Any] = {}
        self._waiting: dict[int, list[CompletionOutput]] = {}

    def size(self, prompt: int, output: RequestOutput) -> int:
        begun = [*self._waiting.get(prompt, ()), *output.outputs]
        num_first = sum(self._number(prompt, each) not in self._begun for each in begun)
        known = self._echoed_logprobs.get(prompt, output.prompt_logprobs)
        return super().size(prompt, output) + num_first * num_logprobs(known)

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionReply:
        choices = []
        for index, output in enumerate(outputs):
            self.usage.add(index, output)
            self._echoed_logprobs[index] = output.prompt_logprobs or []
            if self._body.is_ranked:
                output = best(output, self._body.n or 1)
            of_prompt = prompt_logprobs(output.prompt_logprobs)
            choices += [self._choice(index, each, of_prompt) for each in output.outputs]
        return CompletionReply(
            **self.head,
            choices=choices,
            usage=self.usage.total(Usage),
            system_fingerprint=self.server.replies.fingerprint,
            metrics=self.usage.metrics,
            kv_transfer_params=outputs[0].kv_transfer_params if len(outputs) == 1 else None,
        )

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[CompletionChunk]:
        self.usage.add(prompt, output)
        for completion in self._due(prompt, output):
            choice = self._delta(prompt, completion)
            is_last = completion.finish_reason is not None
            yield self.chunk(prompt, completion.index, choice, is_last=is_last)

    def _due(self, prompt: int, output: RequestOutput) -> list[CompletionOutput]:
        """Completions to send now: those after the prompt's logprobs wait for them."""
        if not self._echoes_logprobs or prompt in self._echoed_logprobs:
            return output.outputs
        waiting = self._waiting.setdefault(prompt, [])
        waiting += output.outputs
        # one that has finished gets none any more, and must not wait for ever
        if output.prompt_logprobs is None and not output.finished:
            return []
        self._echoed_logprobs[prompt] = output.prompt_logprobs or []
        return self._waiting.pop(prompt)

    def _choice(
        self, prompt: int, completion: CompletionOutput, of_prompt: Any
    ) -> CompletionChoice:
        return CompletionChoice(
            **self._fields(prompt, completion, is_first=True),
            prompt_logprobs=of_prompt,
            prompt_token_ids=self._prompts[prompt].ids if self._body.return_token_ids else None,
            routed_experts=experts_file(completion),
        )

    def _delta(self, prompt: int, completion: CompletionOutput) -> CompletionChunkChoice:
        is_first = self._number(prompt, completion) not in self._begun
        shows_prompt = is_first and bool(self._body.return_token_ids or self._body.echo)
        fields = self._fields(prompt, completion, is_first=is_first)
        self._begun.add(fields["index"])
        ids = self._prompts[prompt].ids if shows_prompt else None
        return CompletionChunkChoice(**fields, prompt_token_ids=ids)

    def _fields(
        self, prompt: int, completion: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        number = self._number(prompt, completion)
        text = (self._echoed(prompt) if is_first else "") + self._text(completion)
        self._sent[number] = self._sent.get(number, 0) + len(text)
        return {
            "index": number,
            "text": text,
            "logprobs": self._logprobs(prompt, completion, is_first=is_first),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": self._ids(completion) if self._body.return_token_ids else None,
        }

    def _number(self, prompt: int, completion: CompletionOutput) -> int:
        return prompt * (self._body.n or 1) + completion.index

    def _text(self, completion: CompletionOutput) -> str:
        return "" if _is_only_echo(self._body) else completion.text

    def _ids(self, completion: CompletionOutput) -> list[int]:
        return [] if _is_only_echo(self._body) else completion.token_ids

    def _echoed(self, prompt: int) -> str:
        """The prompt's text in front of the completion, if asked for."""
        if not self._body.echo:
            return ""
        given = self._prompts[prompt]
        return self.server.need_tokenizer().decode(given.ids) if given.text is None else given.text

    def _logprobs(
        self, prompt: int, completion: CompletionOutput, *, is_first: bool
    ) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        positions: list[Any] = list(completion.logprobs or [])
        token_ids = list(completion.token_ids)
        if _is_only_echo(self._body):
            positions, token_ids = [], []
        if self._body.echo and is_first:
            ids, known = self._prompts[prompt].ids, self._echoed_logprobs.get(prompt, ())
            unknown = [None] * (len(ids) - len(known))  # none asked for, or not computed in time
            positions = [*known, *unknown, *positions]
            token_ids = ids + token_ids
        return completion_logprobs(
            positions,
            token_ids,
            [self._token_text(p, i) for p, i in zip(positions, token_ids, strict=True)],
            self._text_offsets(prompt, completion, token_ids, is_first=is_first),
            as_ids=self.shows_tokens_as_ids,
        )

    def _text_offsets(
        self, prompt: int, completion: CompletionOutput, token_ids: list[int], *, is_first: bool
    ) -> list[int]:
        """Offsets of the tokens in the text of their choice; all 0 without a tokenizer."""
        number, given = self._number(prompt, completion), self._prompts[prompt]
        if self.server.tokenizer is None:
            return [0] * len(token_ids)
        if number not in self._offsets:
            self._offsets[number] = TextOffsets(
                self.server.tokenizer,
                given.ids,
                skip_special_tokens=given.params.skip_special_tokens,
            )
        offsets = self._offsets[number]
        echoed = offsets.of_prompt(self._echoed(prompt)) if self._body.echo and is_first else []
        # only the end shows whether the text was cut at a stop string
        most = None if completion.finish_reason is None else self._sent[number]
        return echoed + offsets.of_output(token_ids[len(echoed) :], most)

    def _token_text(self, position: Any, token_id: int) -> str:
        entry = None if position is None else position[token_id]
        if entry is not None and entry.decoded_token is not None:
            return str(entry.decoded_token)
        return "" if self.server.tokenizer is None else self.server.tokenizer.token_text(token_id)
