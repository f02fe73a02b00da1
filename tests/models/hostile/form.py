"""What makes a tiny model hostile: values that hide nothing.

Gentle values make wrong code look right: a small epsilon hides where it is added, a window longer
than the prompt hides that it is ignored, a multiplier of one hides that it is missing. So epsilon
is 0.05, windows are 4, caps about 1.5, every layer type and every bias occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 4, "layer_types": TYPES}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def rope(kind: str, theta: float = 1e3, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = {"factor": 4.0, "beta_fast": 1.3, "beta_slow": 0.2, "original_max_position_embeddings": 16}
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.3 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}


Oracle = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [T] -> logits [T, V] in float32."""


@dataclass(frozen=True)
class Hostile:
    """One model: its type for transformers, what differs from `base`, and the length that it is
    served with.

    `nulls` are keys that it has as null. Where transformers does not have it, `reference` makes an
    oracle from config.json and the stored tensors (references.py). `architecture` is what
    config.json says in place of transformers' name. `attention` is transformers' implementation.
    `part_of`: the architecture of a model that also takes pictures, as whose text part it is
    stored. `whole`: transformers' class that has the text within it alone, as which it is stored
    and compared. `lacks_embeddings`: transformers' hidden states begin with the output of the first
    layer. Models that are not `is_default` run with `--full` only: one is where no other that runs
    by default has a kind of fact that it has. `seed` of its weights: another one where two experts'
    scores are too near to each other for some processor's rounding.
    """

    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 64
    base: Mapping[str, Any] = field(default_factory=lambda: BASE)
    architecture: str | None = None
    part_of: str | None = None
    whole: str | None = None
    reference: Callable[[dict[str, Any], dict[str, torch.Tensor]], Oracle] | None = None
    nulls: tuple[str, ...] = ()
    length_key: str = "max_position_embeddings"
    attention: str = "eager"
    lacks_embeddings: bool = False
    is_default: bool = False
    seed: int = 0
