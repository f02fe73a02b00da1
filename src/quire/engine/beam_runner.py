"""Runs beam searches on an engine: each step asks for one token of every live text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from quire.beam_search import BeamSearch, BeamSearchOutput
from quire.engine.llm_engine import LLMEngine
from quire.engine.offline import OfflineBatch, OfflineRequests, options_of_each
from quire.engine.progress import Progress
from quire.errors import EngineError, InvalidParameter, InvalidType, NotBuiltYet
from quire.params import BeamSearchParams, SamplingParams, checks
from quire.prompts import parse_prompt
from quire.request_options import BatchOptions, RequestOptions


class BeamRunner:
    """Looks for the likeliest texts of prompts, `concurrency_limit` prompts at a time (None: all).
    Its requests are queued among the caller's `requests`.

    Raises RequestError for parameters that the engine cannot serve.
    """

    def __init__(
        self,
        engine: LLMEngine,
        requests: OfflineRequests,
        params: BeamSearchParams,
        concurrency_limit: int | None,
        options: BatchOptions,
    ) -> None:
        if not isinstance(params, BeamSearchParams):
            raise InvalidType("params", params, "it must be a BeamSearchParams")
        if params.watermarking is not None:
            raise NotBuiltYet("watermarking", params.watermarking, "Leave it out.")
        if concurrency_limit is not None:
            allowed = "it must be None or an int of at least 1"
            checks.integer("concurrency_limit", concurrency_limit, 1, checks.MAX_INT, allowed)
        self._engine = engine
        self._inputs = engine.front_end.inputs
        self._requests = requests
        self._params = params
        self._at_once = concurrency_limit
        self._options = options
        limit = self._inputs.limits.max_logprobs
        if limit != -1 and 2 * params.beam_width > limit:
            allowed = f"a step asks for 2 * beam_width logprobs, and max_logprobs is {limit}"
            hint = "Raise the engine's max_logprobs."
            raise InvalidParameter("beam_width", params.beam_width, allowed, hint)

    def run(
        self, prompts: Sequence[object], use_tqdm: bool | Callable[..., Any]
    ) -> list[BeamSearchOutput]:
        options = options_of_each(self._options, len(prompts))
        searches = [
            self._search(prompt, each) for prompt, each in zip(prompts, options, strict=True)
        ]
        at_once = self._at_once or max(1, len(searches))
        with (
            Progress(use_tqdm, len(searches), "Searched prompts")
            if use_tqdm and len(searches)
            else nullcontext() as bar
        ):
            for start in range(0, len(searches), at_once):
                part = searches[start : start + at_once]
                while live := [search for search in part if not search.is_over]:
                    self._step(live)
                if bar is not None:
                    for _ in part:
                        bar.tick()
        return [self._output(search) for search in searches]

    def _search(self, prompt: object, options: RequestOptions) -> BeamSearch:
        token_ids = self._inputs.generation.prompt_token_ids(parse_prompt(prompt), None)
        room = self._inputs.limits.max_len - len(token_ids)
        tokenizer = self._engine.tokenizer
        eos = None if tokenizer is None else tokenizer.eos_token_id
        most = min(room, self._params.max_tokens)
        ends = self._inputs.limits.eos_token_ids
        return BeamSearch(prompt, token_ids, self._params, eos, most, options, form_ends=ends)

    def _step(self, searches: list[BeamSearch]) -> None:
        """One token more for every live text of `searches`, all in one batch."""
        prompts: list[object] = []
        params: list[SamplingParams] = []
        for search in searches:
            grown, own = search.step()
            prompts += grown
            params += [own] * len(grown)
        adapters = [beam.lora_request for search in searches for beam in search.beams]
        options = BatchOptions(lora_request=adapters)
        batch = OfflineBatch(prompts=prompts, total=len(prompts), params=params, options=options)
        completions = iter([out.outputs[0] for out in self._requests.run(batch, False)])
        for search in searches:
            ended = [next(completions) for _ in search.beams]
            for completion in ended:
                if completion.finish_reason == "error":
                    raise EngineError(completion.error or "A step of the beam search failed.")
            search.take(ended)

    def _output(self, search: BeamSearch) -> BeamSearchOutput:
        best, tokenizer = search.best(), self._engine.tokenizer
        if tokenizer is not None:
            for beam in best:
                skips = self._params.skip_special_tokens
                beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=skips)
        return BeamSearchOutput(best)
