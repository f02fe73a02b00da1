"""All operations, in the order in which a decoder uses them on the way to a token."""

from __future__ import annotations

from types import MappingProxyType

from quire.ops.activation import (
    bounded_gated,
    modulate,
    scale_gate,
    scale_heads,
    sparse_gated,
    xielu,
)
from quire.ops.attention import attend, plan_attention
from quire.ops.collective import linear_partial, linear_total, row_peaks
from quire.ops.embed import embed, embed_packed
from quire.ops.formats.lora import (
    allocate_lora,
    load_lora,
    lora,
    lora_embed,
    lora_partial,
    lora_total,
)
from quire.ops.kv import allocate_kv, allocate_shared_kv, copy_kv, export_kv, import_kv, zero_kv
from quire.ops.linear import hidden, linear, logits, pack_linear
from quire.ops.mixers.latent import (
    heads_linear,
    latent_attend,
    latent_store,
    pack_heads,
    plan_latent,
)
from quire.ops.mixers.prompts import attend_prompts, plan_prompts
from quire.ops.mixers.state import gated_delta, gated_norm, mamba2_scan, mamba_scan, short_conv
from quire.ops.mixers.streams import (
    add_matched,
    add_to_streams,
    correct_streams,
    enter_streams,
    join_streams,
    predict_streams,
)
from quire.ops.moe import moe, pack_experts
from quire.ops.norm import add, add_norm, multiply, norm
from quire.ops.registry import Op
from quire.ops.rotary import rope_queries, rope_store, scale_queries
from quire.ops.routing import route
from quire.ops.sampling.edits import bias_logits, forbid_words, penalize
from quire.ops.sampling.grammar_mask import mask_logits
from quire.ops.sampling.sample import draw, greedy, rank, truncate

CATALOG: MappingProxyType[str, Op] = MappingProxyType(
    {
        record.name: record
        for record in (
            embed,
            embed_packed,
            norm,
            add,
            multiply,
            add_norm,
            scale_gate,
            scale_heads,
            modulate,
            bounded_gated,
            sparse_gated,
            xielu,
            pack_linear,
            linear,
            hidden,
            logits,
            row_peaks,
            linear_partial,
            linear_total,
            allocate_lora,
            load_lora,
            lora,
            lora_partial,
            lora_total,
            lora_embed,
            allocate_kv,
            allocate_shared_kv,
            export_kv,
            import_kv,
            copy_kv,
            zero_kv,
            rope_store,
            rope_queries,
            scale_queries,
            plan_attention,
            attend,
            plan_prompts,
            attend_prompts,
            pack_heads,
            heads_linear,
            latent_store,
            plan_latent,
            latent_attend,
            short_conv,
            mamba_scan,
            mamba2_scan,
            gated_delta,
            gated_norm,
            join_streams,
            enter_streams,
            predict_streams,
            correct_streams,
            add_to_streams,
            add_matched,
            pack_experts,
            route,
            moe,
            mask_logits,
            bias_logits,
            penalize,
            forbid_words,
            greedy,
            draw,
            truncate,
            rank,
        )
    }
)
"""Name -> op."""
