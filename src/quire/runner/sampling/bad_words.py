"""`bad_words`: the token that would complete a forbidden word is forbidden."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.sampling.part import TokenHistory


@dataclass(frozen=True, slots=True)
class _Words:
    """Words of one length: the tokens before the last [W, n - 1] int32, and the last ones [W]."""

    before: Tensor
    last: Tensor


class BadWords:
    """Forbids words of one token always, longer ones where the output ends with their beginning."""

    def __init__(self, history: TokenHistory, device: torch.device) -> None:
        self._history = history
        self._device = device
        self._words: dict[int, list[_Words]] = {}
        self._num_prompt_tokens: dict[int, int] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if not params.bad_words_token_ids:
            return False
        by_length: dict[int, list[list[int]]] = {}
        for word in params.bad_words_token_ids:
            by_length.setdefault(len(word), []).append(word)
        self._words[row] = [self._same_length(by_length[n]) for n in sorted(by_length)]
        self._num_prompt_tokens[row] = num_prompt_tokens
        return True

    def remove(self, row: int) -> None:
        del self._words[row], self._num_prompt_tokens[row]

    def wants(self, row: int, position: int) -> bool:
        return True

    def apply(self, logits: Tensor, row: int, position: int) -> None:
        output = self._history.token_ids[row, self._num_prompt_tokens[row] : position]
        for words in self._words[row]:
            length = words.before.shape[1]
            if length <= output.shape[0]:
                end = output[output.shape[0] - length :]
                _forbid(logits, words.last, (words.before == end).all(1))

    def _same_length(self, words: list[list[int]]) -> _Words:
        ids = torch.tensor(words, device=self._device)
        return _Words(ids[:, :-1].to(torch.int32), ids[:, -1])


def _forbid(logits: Tensor, ids: Tensor, where: Tensor) -> None:
    limits = torch.where(where, -math.inf, math.inf).to(logits.dtype)
    logits.scatter_reduce_(0, ids, limits, "amin")
