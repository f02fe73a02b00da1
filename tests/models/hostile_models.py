"""Tiny random models of every family, made by transformers with values that hide nothing.

Gentle values make wrong code look right: a small epsilon hides where it is added, a window longer
than the prompt hides that it is ignored, a multiplier of one hides that it is missing. So epsilon
is 0.05, windows are 4, caps about 1.5, every layer type and every bias occurs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

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


@dataclass(frozen=True)
class Hostile:
    """One model: its type for transformers, what differs from BASE, and the length that it is
    served with.
    """

    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 64


HOSTILE = {
    "llama": Hostile("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": Hostile("llama", LLAMA3),
    "llama-linear": Hostile("llama", rope("linear", factor=3.0)),
    "llama-yarn": Hostile("llama", rope("yarn", **YARN, truncate=False)),
    "llama-yarn-mscale": Hostile("llama", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.9)),
    "llama-dynamic": Hostile("llama", rope("dynamic", factor=4.0)),
    "mistral": Hostile("mistral", {"sliding_window": 4}),
    "qwen2": Hostile("qwen2", {"use_sliding_window": True, **WINDOWS, "head_dim": None}),
    "qwen3": Hostile(
        "qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    ),
    "gemma": Hostile("gemma", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": Hostile(
        "gemma2",
        {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "sliding_window": 4,
        },
    ),
    "gemma3": Hostile(
        "gemma3_text",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 10,
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": Hostile(
        "phi3",
        {
            "head_dim": None,
            "sliding_window": 4,
            **rope("longrope", **LONG),
            "original_max_position_embeddings": 48,
        },
        max_model_len=48,
    ),
    "phi3-long": Hostile(
        "phi3",
        {
            "head_dim": None,
            **rope("longrope", **LONG),
            "original_max_position_embeddings": 8,
        },
    ),
    "olmo2": Hostile("olmo2", {"attention_bias": True}),
    "gpt2": Hostile(
        "gpt2",
        {
            "vocab_size": 96,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 80,
            "n_positions": 64,
            "layer_norm_epsilon": 0.05,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "granite": Hostile(
        "granite",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "starcoder2": Hostile(
        "starcoder2", {"sliding_window": 4, "norm_epsilon": 0.05, "rms_norm_eps": None}
    ),
    "mixtral": Hostile("mixtral", {**EXPERTS, "sliding_window": 4}),
    "qwen3_moe": Hostile(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe-renorm": Hostile(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 4,
        },
    ),
    "gpt_oss": Hostile(
        "gpt_oss",
        {
            **EXPERTS,
            **WINDOWS,
            "swiglu_limit": 0.4,
            **rope("yarn", **YARN, truncate=True),
        },
    ),
}


@dataclass(frozen=True)
class Made:
    """A checkpoint in float32, and what transformers makes of `prompts` with it."""

    folder: Path
    prompts: list[torch.Tensor]
    logits: list[torch.Tensor]
    max_model_len: int


class Library:
    """Makes each checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Made] = {}

    def __getitem__(self, name: str) -> Made:
        if name not in self._made:
            self._made[name] = make(HOSTILE[name], self._folder / name)
        return self._made[name]


def make(hostile: Hostile, folder: Path) -> Made:
    model = random_model(hostile)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 96, (n,), generator=generator) for n in (23, 9, 14)]
    with torch.no_grad():
        logits = [model(p[None], use_cache=False).logits[0].float() for p in prompts]
    return Made(folder, prompts, logits, hostile.max_model_len)


def random_model(hostile: Hostile) -> torch.nn.Module:
    base = {} if hostile.kind == "gpt2" else BASE
    keys = {k: v for k, v in {**base, **hostile.keys}.items() if v is not None}
    config = AutoConfig.for_model(hostile.kind, **keys, attn_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            one = 1.0 if is_norm and "gemma" not in hostile.kind else 0.0
            value.copy_(torch.randn_like(value) * 0.15 + one)
    return model
