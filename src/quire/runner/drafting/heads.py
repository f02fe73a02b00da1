"""Drafts of Medusa heads, which all read the hidden state that the target's own head has read."""

from __future__ import annotations

import numpy as np
import torch

from quire.models.drafting.medusa_heads import MedusaHeads
from quire.runner.devices.device import Device
from quire.runner.drafting.drafter import VerifiedStep
from quire.runner.drafting.networks import valid_counts
from quire.runner.rows import Rows
from quire.runner.sampling import Sampler
from quire.step.plan import NewRow


class HeadsDrafter:
    """Drafts with one head for each token, drawn with the noise of the target."""

    def __init__(
        self, heads: MedusaHeads, sampler: Sampler, device: Device, *, is_greedy: bool = False
    ) -> None:
        """is_greedy: the likeliest tokens are guessed at every temperature."""
        self._heads, self._sampler, self._device = heads, sampler, device
        self._is_greedy = is_greedy

    def add_row(self, new: NewRow) -> None:
        """Do nothing: the heads remember nothing."""

    def remove_row(self, row: int) -> None:
        """Do nothing: the heads remember nothing."""

    @torch.inference_mode()
    def propose(self, rows: Rows, step: VerifiedStep) -> list[int]:
        limits = np.array(step.limits, dtype=np.int64)
        if not limits.any():
            return [0] * len(limits)
        sampled = np.array(step.sampled, dtype=np.int64)
        ends = step.inputs.starts[:-1] + valid_counts(step) - 1
        last = dict(zip(step.inputs.rows.tolist(), ends.tolist(), strict=True))
        places = np.array([last[row] for row in step.sampled], dtype=np.int64)
        hidden = step.states.last.index_select(0, self._device.send(places))
        for head in range(int(limits.max())):
            wanted = np.flatnonzero(limits > head)
            at, positions = sampled[wanted], rows.num_tokens[sampled[wanted]] + head
            read = hidden
            if len(wanted) < len(sampled):
                read = hidden.index_select(0, self._device.send(wanted))
            logits = self._heads.logits(head, read)
            ids = self._sampler.guess(
                logits, at, positions, self._heads.token_ids, is_greedy=self._is_greedy
            )
            rows.write(self._device.send(at), self._device.send(positions), ids)
        return [int(n) for n in limits]
