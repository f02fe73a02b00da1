"""Loss of a copy of the embedded model on library files that were kept out of its training."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire import embedded
from quire.models.decoder import DecoderModel
from quire.ops import Batch, GroupBatch, Ops
from quire.text.tokenizer import Tokenizer


def held_out_windows(
    names: Sequence[str], window: int = 768, step: int | None = None
) -> Iterator[Tensor]:
    """The first tokens of each file, or every `step`-th window of it."""
    tokenizer = Tokenizer.from_folder(embedded.path())
    for name in names:
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer.encode(text))
        for start in range(0, len(ids) - window + 1, step or len(ids)):
            yield ids[start : start + window]


def logits_of(model: DecoderModel, ops: Ops, ids: Tensor) -> Tensor:
    """All logits of one prompt, in one step."""
    spec, count = model.spec, len(ids)
    blocks = -(-count // 16)
    kv = [
        ops.allocate_kv(blocks, 16, memory.kv_heads, memory.head_dim, torch.bfloat16)
        for memory in (block.mixer.memory for block in spec.blocks)
    ]
    plan = ops.plan_attention(
        query_start=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        block_size=16,
        window=None,
    )
    positions = torch.arange(count)
    groups = [GroupBatch(positions, plan)]
    hidden = model.forward(Batch(ids, None, positions[None], groups, kv, [0] * len(kv), count))
    return model.logits(hidden.last)


def mean_loss(model: DecoderModel, ops: Ops, windows: Iterable[Tensor]) -> float:
    """Nats per token."""
    losses = [F.cross_entropy(logits_of(model, ops, ids)[:-1], ids[1:]).item() for ids in windows]
    return sum(losses) / len(losses)
