"""`logit_bias`: a number added to the logits of given ids."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.params import SamplingParams


class LogitBias:
    """Adds each id's bias to its logit; a forbidden id stays forbidden."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if not params.logit_bias:
            return False
        ids = torch.tensor(list(params.logit_bias), device=self._device)
        values = torch.tensor(list(params.logit_bias.values()), device=self._device)
        self._biases[row] = (ids, values.to(torch.float32))
        return True

    def remove(self, row: int) -> None:
        del self._biases[row]

    def wants(self, row: int, position: int) -> bool:
        return True

    def apply(self, logits: Tensor, row: int, position: int) -> None:
        ids, values = self._biases[row]
        logits.index_add_(0, ids, values)
