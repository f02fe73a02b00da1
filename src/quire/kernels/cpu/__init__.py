"""The provider "cpu": the native kernels of csrc/, bound to a runtime."""

from __future__ import annotations

import torch

from quire.kernels.cpu.attention_ops import AttentionOps
from quire.kernels.cpu.kv_ops import KVOps
from quire.kernels.cpu.latent_ops import LatentOps
from quire.kernels.cpu.linear_ops import LinearOps
from quire.kernels.cpu.lora_ops import LoraOps
from quire.kernels.cpu.mask_ops import MaskOps
from quire.kernels.cpu.prompt_ops import PromptOps
from quire.kernels.cpu.row_ops import RowOps
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.kernels.cpu.sample_ops import SampleOps
from quire.kernels.cpu.state_ops import StateOps
from quire.ops.catalog import CATALOG
from quire.ops.registry import Facts, Implementation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_OPS = ("embed", "norm", "add", "add_norm", "scale_gate")
KV_OPS = (
    *("allocate_kv", "allocate_shared_kv"),
    *("export_kv", "import_kv", "copy_kv", "zero_kv"),
)
ATTENTION_OPS = ("rope_store", "rope_queries", "plan_attention", "attend")
PROMPT_OPS = ("plan_prompts", "attend_prompts")
LINEAR_OPS = (
    *("embed_packed", "pack_linear", "linear", "hidden", "logits"),
    *("linear_partial", "linear_total", "pack_experts", "moe"),
)
LORA_OPS = (
    *("allocate_lora", "load_lora", "lora"),
    *("lora_partial", "lora_total", "lora_embed"),
)
LATENT_OPS = ("pack_heads", "heads_linear", "latent_store", "plan_latent", "latent_attend")
MASK_OPS = ("mask_logits",)
STATE_OPS = ("short_conv", "mamba_scan", "mamba2_scan", "gated_delta", "gated_norm")
SAMPLE_OPS = ("greedy", "draw", "truncate", "rank")
NATIVE_OPS = (
    *(*ROW_OPS, *LINEAR_OPS, *LORA_OPS, *KV_OPS, *ATTENTION_OPS),
    *PROMPT_OPS,
    *(*LATENT_OPS, *STATE_OPS, *MASK_OPS, *SAMPLE_OPS),
)


def implementations(facts: Facts) -> tuple[Implementation, ...]:
    """The native ops on `facts.runtime`; without one, on the calling thread alone."""
    native, reason = find_native()
    if native is None:
        return tuple(
            Implementation(op, "cpu", CATALOG[op].definition, lambda _: reason) for op in NATIVE_OPS
        )
    runtime = facts.runtime or CpuRuntime()
    assert isinstance(runtime, CpuRuntime)
    families = (
        (RowOps(runtime), ROW_OPS),
        (LinearOps(runtime, facts.dtype), LINEAR_OPS),
        (LoraOps(runtime), LORA_OPS),
        (KVOps(runtime), KV_OPS),
        (AttentionOps(runtime), ATTENTION_OPS),
        (PromptOps(runtime), PROMPT_OPS),
        (LatentOps(runtime), LATENT_OPS),
        (StateOps(runtime), STATE_OPS),
        (MaskOps(runtime), MASK_OPS),
        (SampleOps(runtime), SAMPLE_OPS),
    )
    return tuple(
        Implementation(op, "cpu", getattr(family, op), supports, batch_invariant=True)
        for family, names in families
        for op in names
    )


def supports(facts: Facts) -> bool | str:
    """Whether activations of this kind are served, or why not."""
    if facts.device.type != "cpu":
        return f"is for the CPU, not for {facts.device.type}"
    if facts.dtype not in DTYPES:
        return f"has no {str(facts.dtype).removeprefix('torch.')}"
    return True
