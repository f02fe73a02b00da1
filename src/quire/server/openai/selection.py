"""Completions that are chosen among more than the reply has: `best_of` and beam search."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from quire.beam_search import BeamSearch, BeamSearchSequence
from quire.engine.frontend.output_stream import last_outputs
from quire.errors import InvalidParameter
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import BeamSearchParams
from quire.server.context import Prompt, RequestName, Server
from quire.server.http.in_flight import while_connected
from quire.server.openai.requests import GenerationFields

NOT_WITH_BEAMS = (
    *("stop", "stop_token_ids", "min_tokens", "logit_bias", "bad_words", "seed", "top_p"),
    *("allowed_token_ids", "logprob_token_ids", "prompt_logprobs", "top_k"),
    *("repetition_detection", "thinking_token_budget", "vllm_xargs", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "echo", "tools", "functions"),
    *("best_of", "stream"),
)
"""Fields that a search for the likeliest texts cannot honour."""


def check_beams(body: GenerationFields, max_logprobs: int) -> None:
    """Raise InvalidParameter for what does not go with a beam search."""
    for name in NOT_WITH_BEAMS:
        if getattr(body, name, None):
            raise InvalidParameter(name, getattr(body, name), "a beam search cannot honour it")
    width = body.n or 1
    # each beam may end in one of its candidates, so twice as many are asked for
    if max_logprobs != -1 and 2 * width > max_logprobs:
        allowed = f"a beam search may have {max_logprobs // 2} beams (half of max_logprobs)"
        raise InvalidParameter("n", width, allowed)


def best(output: RequestOutput, num: int) -> RequestOutput:
    """Keep the `num` completions of `output` with the highest mean logprob, best first."""

    def mean(completion: CompletionOutput) -> float:
        return (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))

    output.outputs = sorted(output.outputs, key=mean, reverse=True)[:num]
    # the client must not see that there were others
    for index, completion in enumerate(output.outputs):
        completion.index = index
    return output


async def beam_outputs(
    server: Server,
    request: Request,
    body: GenerationFields,
    name: RequestName,
    prompts: Sequence[Prompt],
) -> list[RequestOutput]:
    """The `n` likeliest texts of each prompt that a search with `n` beams finds, best first.

    Raises RequestError, EngineGenerateError; ClientDisconnect when the client disconnects.
    """
    searches = [_Beams(server, body, prompt) for prompt in prompts]
    runs = [search.run(request, body, name) for search in searches]
    return await while_connected(request, asyncio.gather(*runs))


class _Beams:
    """The search for one prompt."""

    def __init__(self, server: Server, body: GenerationFields, prompt: Prompt) -> None:
        self._server = server
        self._prompt = prompt
        max_tokens = prompt.params.max_tokens or 1
        self._params = BeamSearchParams(
            beam_width=body.n or 1,
            max_tokens=max_tokens,
            ignore_eos=bool(body.ignore_eos),
            temperature=1.0 if body.temperature is None else body.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            length_rule=body.length_rule or "sequence",
            structured_outputs=prompt.params.structured_outputs,
        )
        self._skips_special = body.skip_special_tokens is not False
        eos = server.need_tokenizer().eos_token_id
        ends = server.engine.front_end.inputs.limits.eos_token_ids
        self._search = BeamSearch(None, prompt.ids, self._params, eos, max_tokens, form_ends=ends)

    async def run(
        self, request: Request, body: GenerationFields, name: RequestName
    ) -> RequestOutput:
        while not self._search.is_over:
            begun, step = self._search.step()
            grown = [
                replace(
                    self._prompt,
                    text=None,
                    ids=one.prompt,
                    output_ids=one.output_token_ids,
                    params=step,
                )
                for one in begun
            ]
            # each step is a request of its own, and keys of the engine are used once
            streams = await self._server.start(request, body, name.another(), grown, is_step=True)
            self._search.take([last.outputs[0] for last in await last_outputs(streams)])
        found = [self._completion(*item) for item in enumerate(self._search.best())]
        return RequestOutput(name.shown, self._prompt.text, self._prompt.ids, None, found, True)

    def _completion(self, index: int, beam: BeamSearchSequence) -> CompletionOutput:
        ids = beam.tokens[len(self._prompt.ids) :]
        ended = bool(ids) and self._search.has_ended(beam)
        decode = self._server.need_tokenizer().decode
        return CompletionOutput(
            index,
            decode(ids, skip_special_tokens=self._skips_special),
            ids,
            beam.cum_logprob,
            beam.logprobs,
            beam.finish_reason or ("stop" if ended else "length"),
        )
