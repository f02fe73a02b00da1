"""The guessers of each method that needs no model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.config.speculation import SpeculationPlan
from quire.runner.drafting.custom import CustomGuesser, make_proposer
from quire.runner.drafting.guesser import Guesser, OpenGuesser
from quire.runner.drafting.ngram import NgramGuesser
from quire.runner.drafting.suffix import OutputCache, SuffixGuesser


def open_guessers(plan: SpeculationPlan) -> OpenGuesser:
    """The guesser from tokens alone. Raises InvalidParameter for a class that is not a guesser."""
    if plan.method == "ngram":
        return partial(_open_ngram, plan)
    if plan.method == "custom_class":
        return partial(_open_custom, make_proposer(plan))
    assert plan.method in ("suffix", "auto"), "the other methods need weights"
    rules = plan.suffix
    cache = None
    if rules.max_cached_requests:
        cache = OutputCache(rules.depth, rules.max_cached_requests)
    by_suffix = partial(SuffixGuesser, rules=rules, cache=cache)
    if plan.method == "suffix":
        return by_suffix
    return lambda prompt, output: FirstOf(
        [by_suffix(prompt, output), _open_ngram(plan, prompt, output)]
    )


class FirstOf:
    """Guesses as the first of several that has a guess."""

    def __init__(self, guessers: Sequence[Guesser]) -> None:
        self._guessers = guessers

    def extend(self, token_ids: Sequence[int]) -> None:
        for guesser in self._guessers:
            guesser.extend(token_ids)

    def guess(self, most: int) -> list[int]:
        for guesser in self._guessers:
            if found := guesser.guess(most):
                return found
        return []

    def close(self) -> None:
        for guesser in self._guessers:
            guesser.close()


def _open_ngram(plan: SpeculationPlan, prompt: Sequence[int], output: Sequence[int]) -> Guesser:
    return NgramGuesser([*prompt, *output], plan.ngram.shortest, plan.ngram.longest)


def _open_custom(proposer: object, prompt: Sequence[int], output: Sequence[int]) -> Guesser:
    return CustomGuesser(proposer, [*prompt, *output])
