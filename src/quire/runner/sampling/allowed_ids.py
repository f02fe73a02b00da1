"""`allowed_token_ids`: everything else is forbidden."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.params import SamplingParams


class AllowedIds:
    """Sets all logits but those of the allowed ids to -inf; EOS is no exception."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids: dict[int, Tensor] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if params.allowed_token_ids is None:
            return False
        self._ids[row] = torch.tensor(params.allowed_token_ids, device=self._device)
        return True

    def remove(self, row: int) -> None:
        del self._ids[row]

    def wants(self, row: int, position: int) -> bool:
        return True

    def apply(self, logits: Tensor, row: int, position: int) -> None:
        ids = self._ids[row]
        allowed = logits[ids]
        logits.fill_(-math.inf)
        logits[ids] = allowed
