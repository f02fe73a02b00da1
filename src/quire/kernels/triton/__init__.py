"""Kernels in Triton, for NVIDIA GPUs; in its interpreter they also run on the CPU, in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton import gates, norms, prompt_sums, state
from quire.kernels.triton.attention import (
    attend,
    attend_prompts,
    latent_attend,
    latent_store,
    paged_kv,
    rope_store,
)
from quire.kernels.triton.attention.triton_plan import (
    Means,
    TritonPlan,
    plan_rows,
)
from quire.kernels.triton.launch import is_interpreted
from quire.kernels.triton.linear import heads_product, lora, triton_linear
from quire.kernels.triton.linear.codes import TritonProduct, pack_codes, pack_codes_of_experts
from quire.kernels.triton.moe import experts, routing
from quire.kernels.triton.sampling import draw, edit_logits, mask_logits, rank
from quire.ops.collective import linear_partial, linear_total
from quire.ops.embed import embed, embed_packed
from quire.ops.formats.coded import CodedWeight
from quire.ops.kv import copy_kv, zero_kv
from quire.ops.linear import linear, logits
from quire.ops.quantized import WeightFormat
from quire.ops.registry import Facts, Implementation

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

FIXED_SHAPE = (64, 64)
FAST_SHAPE = (16, 128)
FAST_LATENT_SHAPE = (16, 64)
"""Sizes of tiles of queries, at least and at best. Where bits must not depend on the step, all have
one shape and no keys are shared: a token computed alone is then the token computed within a prompt.
"""

_SMS = 132
_PROGRAMS = 2 * _SMS
"""Programs that keep a large GPU's memory busy; for latents, one for each SM."""
_KV_HEADS = 8
"""K/V heads of a model that does not say."""


def implementations(facts: Facts) -> tuple[Implementation, ...]:
    """Every op that is faster here than in torch."""
    is_fixed = facts.is_deterministic

    def pack_linear(
        weight: Tensor | CodedWeight,
        bias: Tensor | None,
        stored_as: WeightFormat | None = None,
        segments: int = 1,
        peaks: Tensor | None = None,
        gated: bool = False,
    ) -> TritonProduct:
        if isinstance(weight, CodedWeight):
            packed = pack_codes(weight, bias, facts.dtype, facts.device, is_fixed=is_fixed)
        else:
            packed = triton_linear.pack(weight, bias, stored_as, peaks, is_fixed=is_fixed)
        return replace(packed, segments=segments)

    def pack_experts(
        up: Tensor | Sequence[CodedWeight],
        down: Tensor | Sequence[CodedWeight],
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        stored_as: WeightFormat | None = None,
        segments: int = 1,
        gated: bool = False,
    ) -> experts.TritonExperts:
        def packed(weights: Tensor | Sequence[CodedWeight], bias: Tensor | None) -> TritonProduct:
            if isinstance(weights, Tensor):
                return triton_linear.pack(weights, bias, stored_as, is_fixed=is_fixed)
            return pack_codes_of_experts(
                weights, bias, facts.dtype, facts.device, is_fixed=is_fixed
            )

        return experts.TritonExperts(
            packed(up, up_bias), replace(packed(down, down_bias), segments=segments)
        )

    functions: dict[str, Callable[..., Any]] = {
        "norm": norms.norm,
        "add": norms.add,
        "add_norm": norms.add_norm,
        "scale_gate": gates.scale_gate,
        "embed": embed.definition,  # rows of a table: the same bits in every batch
        "embed_packed": embed_packed.definition,
        "pack_linear": pack_linear,
        "linear": linear.definition,
        "hidden": triton_linear.hidden,
        "logits": logits.definition,
        "linear_partial": linear_partial.definition,
        "linear_total": linear_total.definition,
        "allocate_lora": lora.allocate,
        "load_lora": lora.load,
        "lora": lora.addend,
        "lora_partial": lora.partial,
        "lora_total": lora.total,
        "lora_embed": lora.embed,
        "pack_experts": pack_experts,
        "route": routing.route,
        "moe": experts.moe,
        "allocate_kv": paged_kv.allocate_kv,
        "allocate_shared_kv": paged_kv.allocate_shared_kv,
        "export_kv": paged_kv.export_kv,
        "import_kv": paged_kv.import_kv,
        "copy_kv": copy_kv.definition,
        "zero_kv": zero_kv.definition,
        "rope_store": rope_store.rope_store,
        "rope_queries": rope_store.rope_queries,
        "plan_attention": partial(_plan_attention, facts=facts),
        "attend": attend.attend,
        "plan_prompts": partial(attend_prompts.plan_prompts, means=_means(facts, 0)),
        "attend_prompts": attend_prompts.attend_prompts,
        "pack_heads": heads_product.pack_heads,
        "heads_linear": partial(heads_product.heads_linear, is_fixed=is_fixed),
        "latent_store": latent_store.latent_store,
        "plan_latent": partial(_plan_latent, facts=facts),
        "latent_attend": latent_attend.latent_attend,
        "short_conv": state.short_conv,
        "mamba_scan": state.mamba_scan,
        "mamba2_scan": state.mamba2_scan,
        "gated_delta": state.gated_delta,
        "gated_norm": state.gated_norm,
        "sum_chunks": prompt_sums.sum_chunks,
        "mask_logits": mask_logits.mask_logits,
        "bias_logits": edit_logits.bias_logits,
        "penalize": edit_logits.penalize,
        "forbid_words": edit_logits.forbid_words,
        "greedy": draw.greedy,
        "draw": draw.draw,
        "truncate": draw.truncate,
        "rank": rank.rank,
    }
    varies = {
        *("linear", "hidden", "logits", "linear_partial", "moe", "plan_attention", "attend"),
        *("heads_linear", "plan_latent", "latent_attend"),
    }
    return tuple(
        Implementation(
            name, "triton", function, supports, batch_invariant=is_fixed or name not in varies
        )
        for name, function in functions.items()
    )


def supports(facts: Facts) -> bool | str:
    """Whether activations of this kind are served, or why not."""
    if facts.device.type != "cuda" and not is_interpreted():
        return f"is for GPUs, not for {facts.device.type}"
    if facts.dtype not in DTYPES:
        return f"has no {str(facts.dtype).removeprefix('torch.')}"
    return True


def _plan_attention(
    *,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    block_table: Tensor,
    block_size: int,
    window: int | None,
    kv_heads: int | None = None,
    facts: Facts,
) -> TritonPlan:
    is_fixed = facts.is_deterministic
    spare = 0 if is_fixed else max(1, _PROGRAMS // (kv_heads or _KV_HEADS))
    return plan_rows(
        *(query_start, seq_lens, block_table, block_size, window), means=_means(facts, spare)
    )


def _plan_latent(
    *,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    block_table: Tensor,
    block_size: int,
    facts: Facts,
) -> TritonPlan:
    means = _means(facts, 0 if facts.is_deterministic else _SMS)
    if means.spare:
        means = replace(means, shape=FAST_LATENT_SHAPE)
    return plan_rows(query_start, seq_lens, block_table, block_size, None, means=means)


def _means(facts: Facts, spare: int) -> Means:
    """The settings of plans with `spare` programs. What a runtime stages is sent to the device with
    the step's other arrays.
    """

    staging: Any = facts.runtime

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(facts.device)

    return Means(
        spare,
        upload=upload if staging is None else staging.stage,
        shape=FAST_SHAPE if spare else FIXED_SHAPE,
    )
