"""`POST /inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidParameter, NotBuiltYet
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.context import RequestName, Server
from quire.server.http.fields import BODY_SLOT
from quire.server.openai.completions import completion_prompts
from quire.server.openai.delivery import ReplyWriter, deliver, experts_file
from quire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.server.openai.replies import ChatLogprobs, CompletionChunk
from quire.server.openai.requests import CompletionRequest, GenerationFields
from quire.server.openai.sampling_fields import RequestFields

_FINAL_ONLY = 2
"""The kind of output of whole replies, as a number of vLLM's `RequestOutputKind`."""


class TokenSampling(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The `sampling_params` of a request."""

    logprobs: int | None = None
    output_kind: int | None = None


class TokensRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /inference/v1/generate`."""

    token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    sampling_params: TokenSampling = msgspec.field(default_factory=TokenSampling)
    features: Any = None
    stream: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def as_completion(self) -> CompletionRequest:
        """The request as the other API has it. Raises InvalidParameter or NotBuiltYet."""
        if self.features is not None:
            hint = "Send pictures to /v1/chat/completions."
            raise NotBuiltYet("features", "...", hint)
        if self.stream:
            raise NotBuiltYet("stream", True, "Stream /v1/completions with return_token_ids.")
        if self.output_mode == "text":
            raise NotBuiltYet("output_mode", "text", "Send token ids to /v1/completions.")
        sampling = self.sampling_params
        if sampling.output_kind not in (None, _FINAL_ONLY):
            allowed = f"a reply has whole completions: {_FINAL_ONLY}"
            raise InvalidParameter("sampling_params.output_kind", sampling.output_kind, allowed)
        given = {name: getattr(sampling, name) for name in GenerationFields.__struct_fields__}
        own = {name: getattr(self, name) for name in RequestFields.__struct_fields__}
        given |= {name: value for name, value in own.items() if value is not None}
        if self.kv_transfer_params is not None:
            given["kv_transfer_params"] = self.kv_transfer_params
        return CompletionRequest(
            **given | {"prompt": self.token_ids, "logprobs": sampling.logprobs, "stream": None}
        )

    def field_of(self, parameter: str) -> str:
        is_own = parameter in RequestFields.__struct_fields__
        if parameter == "prompt_token_ids":
            return "token_ids"
        return parameter if is_own else f"sampling_params.{parameter}"


class TokensChoice(msgspec.Struct, kw_only=True):
    """One of n completions. Tokens in its log-probabilities are named `token_id:N`."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None


class TokensReply(msgspec.Struct, kw_only=True):
    """The reply of `/inference/v1/generate`."""

    request_id: str
    choices: list[TokensChoice]
    prompt_logprobs: Any = None
    kv_transfer_params: Any = None


async def generate_tokens(server: Server, request: Request) -> Response:
    """Continue token ids by token ids."""
    given = await server.read_for_model(request, TokensRequest)
    body = given.as_completion()
    prompts = await completion_prompts(server, body, default_max_tokens=None)  # what fits
    request.scope["state"][BODY_SLOT] = given
    name = RequestName.of(request, "", body.request_id)
    writer = _TokensWriter(server, body, name, prompts)
    return await deliver(server, request, body, name, prompts, writer)


class _TokensWriter(ReplyWriter):
    chunk_type = CompletionChunk

    def __init__(
        self, server: Server, body: CompletionRequest, name: RequestName, prompts: Sequence[Any]
    ) -> None:
        super().__init__(server, body, name, prompts)
        self._body = body
        self._name = name

    def whole(self, outputs: Sequence[RequestOutput]) -> TokensReply:
        [output] = outputs
        return TokensReply(
            request_id=self._name.shown,
            choices=[self._choice(each) for each in output.outputs],
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            kv_transfer_params=output.kv_transfer_params,
        )

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[msgspec.Struct]:
        raise AssertionError("streams are refused")

    def _choice(self, completion: CompletionOutput) -> TokensChoice:
        asked, ids = self._body.logprob_token_ids, list(completion.token_ids)
        logprobs = None
        if self._body.logprobs is not None or asked is not None:
            logprobs = chat_logprobs(
                completion.logprobs or [],
                ids,
                self._body.logprobs or int(asked is None),  # 0 lists the sampled token alone
                self.server.need_tokenizer(),
                asked_ids=asked,
                as_ids=True,
            )
        return TokensChoice(
            index=completion.index,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            routed_experts=experts_file(completion),
        )
