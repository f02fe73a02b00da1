"""Drafts how the longest known stretches of tokens went on, in the request and in other outputs
(suffix decoding, Oliaro et al. 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.config.speculation import SuffixRules
from quire.runner.drafting.suffix_trie import GrowingText, SuffixTrie, likeliest

_MOST_NODES = 1_000_000
"""Most nodes of the trie of outputs; a node takes some 100 to 300 bytes."""
_MOST_OWN_NODES = 200_000
"""Most nodes of a request's own trie, which then stops growing."""


class OutputCache:
    """A trie over outputs: of the requests that run, and of those before them.

    The oldest ends are taken out beyond so many outputs, or so many nodes.
    """

    def __init__(self, depth: int, max_outputs: int, max_nodes: int = _MOST_NODES) -> None:
        self.trie = SuffixTrie(depth)
        self._max_outputs = max_outputs
        self._max_nodes = max_nodes
        self._finished: deque[GrowingText] = deque()

    def __len__(self) -> int:
        return len(self._finished)

    def close(self, text: GrowingText) -> None:
        """An output has ended, or is continued under another name."""
        text.ends = []
        self._finished.append(text)
        trie = self.trie
        while self._finished and (
            len(self._finished) > self._max_outputs or trie.num_nodes > self._max_nodes
        ):
            trie.remove(self._finished.popleft())


class SuffixGuesser:
    """Guesses from a trie over the request, and one that it shares with others.

    The last m tokens, for each m for which they are known: the tokens that followed most often,
    as long as they are likely together, at most m * factor + offset. The guess with the largest
    sum of likelihoods counts, of equal ones that of the longest match, and the request's own.
    Tokens enter the tries when a guess is asked for.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        rules: SuffixRules,
        cache: OutputCache | None,
    ) -> None:
        self._rules = rules
        self._cache = cache
        self._own = SuffixTrie(rules.depth)
        self._text, self._shared = GrowingText(), GrowingText()
        self._new = list(prompt)
        self._new_output = list(output)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._new_output += token_ids

    def guess(self, most: int) -> list[int]:
        self._take_in()
        drafts, score = self._best(self._text, most, 0.0)
        if self._cache is not None:
            others, better = self._best(self._shared, most, score)
            if better > score:
                return others
        return drafts

    def close(self) -> None:
        if self._cache is not None:
            self._take_in_output()
            self._cache.close(self._shared)

    def _take_in(self) -> None:
        if self._own.num_nodes < _MOST_OWN_NODES:
            for token in [*self._new, *self._new_output]:
                self._own.grow(self._text, token)
        else:
            self._text.ends = []
        self._take_in_output()
        self._new = []

    def _take_in_output(self) -> None:
        if self._cache is not None:
            for token in self._new_output:
                self._cache.trie.grow(self._shared, token)
        self._new_output = []

    def _best(self, text: GrowingText, most: int, to_beat: float) -> tuple[list[int], float]:
        """The guess with the largest score from the ends of a text, if it is above `to_beat`."""
        rules, best = self._rules, to_beat
        found: list[int] = []
        for index, node in enumerate(text.ends):
            matched = len(text.ends) - index
            budget = int(min(most, matched * rules.factor + rules.offset + 1e-6))
            if budget <= best:
                break  # nothing can be likelier, and shorter matches draft less still
            drafts, score = likeliest(node, budget, rules.min_probability)
            if score > best:
                found, best = drafts, score
        return found, best
