"""Heads turn hidden states into a row's result. This release has the language-model head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.ops import LinearWeight, Ops


@dataclass(frozen=True, slots=True)
class LanguageModelHead:
    """Scores over the vocabulary; `weight` is [V, C] packed, shared with the embedding where the
    spec ties them.
    """

    ops: Ops
    weight: LinearWeight
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C], after the final norm -> fp32 [R, V]."""
        return self.ops.logits(hidden, self.weight, self.scale, self.softcap)
