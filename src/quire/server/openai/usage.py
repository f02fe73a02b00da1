"""Counting the tokens of a reply."""

from __future__ import annotations

from quire.outputs import RequestOutput
from quire.server.openai.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    StreamUsage,
    Usage,
)


class UsageCounter:
    """Tokens of one reply, taken up output by output.

    `prompt_lens` are known before the first output. With `shows_cached` the usage says how many
    prompt tokens came out of the prefix cache.
    """

    def __init__(self, prompt_lens: list[int], *, shows_cached: bool) -> None:
        self._prompt_lens = prompt_lens
        self._shows_cached = shows_cached
        self._cached: dict[int, int] = {}
        self._generated: dict[tuple[int, int], int] = {}
        self.reasoning_tokens: int | None = None

    def take(self, prompt: int, output: RequestOutput) -> None:
        """Count the tokens of a delta, or of a whole output."""
        if output.num_cached_tokens is not None:
            self._cached[prompt] = output.num_cached_tokens
        for completion in output.outputs:
            key = prompt, completion.index
            self._generated[key] = self._generated.get(key, 0) + len(completion.token_ids)

    def whole(self) -> Usage:
        """For a reply that is sent at once."""
        prompt, generated = sum(self._prompt_lens), sum(self._generated.values())
        return Usage(prompt, prompt + generated, generated, self._cached_details(), self._spent())

    def streamed(self) -> StreamUsage:
        """For the last event of a stream."""
        usage = self.whole()
        return StreamUsage(
            usage.prompt_tokens,
            usage.total_tokens,
            usage.completion_tokens,
            usage.prompt_tokens_details,
            usage.completion_tokens_details,
        )

    def of_choice(self, prompt: int, index: int) -> StreamUsage:
        """What one choice has used so far."""
        before, generated = self._prompt_lens[prompt], self._generated.get((prompt, index), 0)
        return StreamUsage(before, before + generated, generated)

    def _cached_details(self) -> PromptTokensDetails | None:
        if not self._shows_cached:
            return None
        return PromptTokensDetails(sum(self._cached.values()))

    def _spent(self) -> CompletionTokensDetails | None:
        if self.reasoning_tokens is None:
            return None
        return CompletionTokensDetails(self.reasoning_tokens)
