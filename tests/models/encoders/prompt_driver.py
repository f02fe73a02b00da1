"""Runs an encoder's layers over whole prompts that lie one after the other."""

from __future__ import annotations

import numpy as np
import torch

from quire.ops import Batch, Ops, PromptBatch


def hidden_states(model, ops: Ops, prompts, seconds=None) -> list[torch.Tensor]:
    """Hidden states [T, C] of each prompt, in one step; `seconds`: where types become 1."""
    lengths = np.array([len(p) for p in prompts], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    seconds = seconds or [None] * len(prompts)
    types = [
        torch.arange(len(p)) >= (len(p) if second is None else second)
        for p, second in zip(prompts, seconds, strict=True)
    ]
    count = len(model.spec.memories)
    batch = Batch(
        ids=torch.tensor([token for prompt in prompts for token in prompt]),
        embeds=None,
        positions=positions[None],
        groups=[PromptBatch(ops.plan_prompts(query_start=starts, seq_lens=lengths))],
        kv=[None] * count,
        layer_groups=[0] * count,
        num_tokens=int(starts[-1]),
        token_types=torch.cat(types).long() if model.spec.token_types else None,
    )
    with torch.inference_mode():
        return list(model.forward(batch).last.split(lengths.tolist()))
