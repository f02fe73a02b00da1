"""Runs prompts and sends the response: whole, or as a stream of events."""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.engine.frontend.output_stream import Outputs, last_outputs, merged, raise_error
from quire.engine.stats.request_drafts import RequestSpecDecodeMetrics
from quire.outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleLogprobs
from quire.server.context import Prompt, RequestName, Server
from quire.server.http.event_stream import DONE, event
from quire.server.http.failures import error_json
from quire.server.http.in_flight import while_connected
from quire.server.http.json_body import json_response
from quire.server.load_report import FORMAT, load_headers
from quire.server.long_texts import off_loop
from quire.server.openai.replies import (
    ChatChunk,
    CompletionChunk,
    CompletionTokensDetails,
    PromptTokensDetails,
    StreamUsage,
    Usage,
)
from quire.server.openai.requests import GenerationFields
from quire.server.openai.selection import beam_outputs, check_beams

U = TypeVar("U", Usage, StreamUsage)


async def deliver(
    server: Server,
    request: Request,
    body: GenerationFields,
    name: RequestName,
    prompts: Sequence[Prompt],
    reply: ReplyWriter,
) -> Response:
    """Run the prompts and send what `reply` makes of them; their errors come before any part."""
    response = await _delivered(server, request, body, name, prompts, reply)
    if FORMAT in request.headers:
        response.headers.update(await load_headers(server, request))
    return response


async def _delivered(
    server: Server,
    request: Request,
    body: GenerationFields,
    name: RequestName,
    prompts: Sequence[Prompt],
    reply: ReplyWriter,
) -> Response:
    if body.use_beam_search:
        check_beams(body, server.engine.front_end.inputs.limits.max_logprobs)
        server.check_logprobs(body, prompts)
        server.tell_cut(request, body, prompts)
        found = await beam_outputs(server, request, body, name, prompts)
        return await _whole(reply, found)
    streams = await server.start(request, body, name, prompts)
    if body.stream:
        return server.stream(_events(streams, reply), streams)
    return await _whole(reply, await while_connected(request, last_outputs(streams)))


async def _whole(reply: ReplyWriter, outputs: Sequence[RequestOutput]) -> Response:
    """The reply, made in a thread where it is long: 60 prompts of 1,000 tokens with 20 logprobs
    each take more than a second.
    """
    # logprobs are what makes a reply long
    size = sum(reply.size(*item) for item in enumerate(outputs))
    return await off_loop(size, lambda: json_response(reply.whole(outputs)))


def experts_file(completion: CompletionOutput) -> str | None:
    """The experts of a completion's tokens as a file of NumPy (`.npy`) in base64, as vLLM sends
    them; None where the engine does not report them.

    Decoded by `numpy.load(io.BytesIO(base64.b64decode(text)))`.
    """
    if completion.routed_experts is None:
        return None
    file = io.BytesIO()
    # no pickle, which a client would have to trust
    np.save(file, completion.routed_experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def num_logprobs(positions: PromptLogprobs | SampleLogprobs | None) -> int:
    """Number of logprobs in a list of positions: about, since those of the last one are counted."""
    return len(positions) * len(positions[-1] or ()) if positions else 0


async def _events(streams: Sequence[Outputs], reply: ReplyWriter) -> AsyncGenerator[bytes]:
    """The stream's events; an error after its start is an event too."""

    def encoded(prompt: int, output: RequestOutput) -> bytes:
        return b"".join(event(to_json(chunk)) for chunk in reply.chunks(prompt, output))

    try:
        async with aclosing(merged(streams)) as outputs:
            async for prompt, output in outputs:
                raise_error(output)
                size = reply.size(prompt, output)
                if pieces := await off_loop(size, encoded, prompt, output):
                    yield pieces
        if (last := reply.last()) is not None:
            yield event(to_json(last))
    # the status is sent already; and clients wait for DONE after an error as well
    except Exception as error:
        yield event(error_json(error))
    yield DONE


class ReplyWriter(ABC):
    """Makes the reply of one request, whole or chunk by chunk; `prompt` counts its prompts."""

    chunk_type: ClassVar[type[ChatChunk] | type[CompletionChunk]]

    def __init__(
        self, server: Server, body: GenerationFields, name: RequestName, prompts: Sequence[Prompt]
    ) -> None:
        self.server = server
        self.head: dict[str, Any] = {
            "id": name.shown,
            "created": name.created,
            "model": server.name_of(body.model),
        }
        self.usage = UsageCounter(
            [len(prompt.ids) for prompt in prompts],
            shows_cached=server.replies.prompt_details,
            num_media_tokens=sum(prompt.num_media_tokens for prompt in prompts),
        )
        options = body.stream_options
        self.shows_usage = server.replies.forces_usage or bool(options and options.include_usage)
        self.shows_continuous_usage = server.replies.forces_usage or bool(
            self.shows_usage and options and options.continuous_usage_stats
        )
        own = body.return_tokens_as_token_ids
        self.shows_tokens_as_ids = server.replies.tokens_as_ids if own is None else own

    def size(self, prompt: int, output: RequestOutput) -> int:
        """Number of logprobs of `output` in the reply, or in the chunks for this delta."""
        listed = [completion.logprobs for completion in output.outputs]
        return sum(map(num_logprobs, [output.prompt_logprobs, *listed]))

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """The body of a reply that is not streamed, from the last output of each prompt."""

    @abstractmethod
    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[msgspec.Struct]:
        """Return the chunks of a stream for this delta."""

    def chunk(self, prompt: int, index: int, choice: Any, *, is_last: bool = False) -> Any:
        """The chunk with one choice, completion `index` of a prompt; `is_last`: it ends there."""
        chunk = self.chunk_type(**self.head, choices=[choice])
        if self.shows_continuous_usage:
            chunk.usage = self.usage.of_choice(prompt, index)
        if is_last and not self.shows_usage:
            chunk.system_fingerprint = self.fingerprint
        return chunk

    def last(self) -> msgspec.Struct | None:
        """The chunk after all others, which has the usage, if it is asked for."""
        if not self.shows_usage:
            return None
        return self.chunk_type(
            **self.head,
            choices=[],
            usage=self.usage.total(StreamUsage),
            system_fingerprint=self.fingerprint,
            metrics=self.usage.metrics or UNSET,
        )

    @property
    def fingerprint(self) -> str | UnsetType:
        """The `system_fingerprint` of a chunk."""
        return self.server.replies.fingerprint or UNSET


class UsageCounter:
    """Tokens of one reply, counted output by output.

    `prompt_lens` are known before the first output. With `shows_cached` the usage says how many
    prompt tokens came out of the prefix cache.
    """

    def __init__(
        self, prompt_lens: list[int], *, shows_cached: bool, num_media_tokens: int = 0
    ) -> None:
        self._prompt_lens = prompt_lens
        self._num_media_tokens = num_media_tokens
        self._shows_cached = shows_cached
        self._cached: dict[int, int] = {}
        self._generated: dict[tuple[int, int], int] = {}
        self._drafts: RequestSpecDecodeMetrics | None = None
        self.reasoning_tokens: int | None = None

    def add(self, prompt: int, output: RequestOutput) -> None:
        if output.num_cached_tokens is not None:
            self._cached[prompt] = output.num_cached_tokens
        for completion in output.outputs:
            key = prompt, completion.index
            self._generated[key] = self._generated.get(key, 0) + len(completion.token_ids)
            # only some outputs of a completion have them
            self._drafts = completion.spec_decode_metrics or self._drafts

    def total(self, kind: type[U]) -> U:
        prompt, generated = sum(self._prompt_lens), sum(self._generated.values())
        cached = None
        if self._shows_cached:
            cached = PromptTokensDetails(
                sum(self._cached.values()), self._num_media_tokens or UNSET
            )
        reasoning = self.reasoning_tokens
        details = None if reasoning is None else CompletionTokensDetails(reasoning)
        return kind(prompt, prompt + generated, generated, cached, details)

    @property
    def metrics(self) -> dict[str, Any] | None:
        """`metrics` of a reply: its one completion's drafts; None: not counted, or several."""
        if self._drafts is None or len(self._generated) > 1:
            return None
        return {"speculative_decoding": self._drafts.to_dict()}

    def of_choice(self, prompt: int, index: int) -> StreamUsage:
        prompt_len, generated = self._prompt_lens[prompt], self._generated.get((prompt, index), 0)
        return StreamUsage(prompt_len, prompt_len + generated, generated)
