"""All operations, in the order in which a decoder uses them on the way to a token."""

from __future__ import annotations

from types import MappingProxyType

from quire.ops import (
    activation,
    attention,
    collective,
    embed,
    kv,
    linear,
    moe,
    norm,
    rotary,
    routing,
)
from quire.ops.formats import lora
from quire.ops.mixers import indexed, latent, pooling, prompts, state, streams
from quire.ops.registry import Op
from quire.ops.sampling import edits, grammar_mask, sample

CATALOG: MappingProxyType[str, Op] = MappingProxyType(
    {
        record.name: record
        for record in (
            embed.embed,
            embed.embed_packed,
            norm.norm,
            norm.add,
            norm.multiply,
            norm.add_norm,
            activation.scale_gate,
            activation.scale_heads,
            activation.modulate,
            activation.bounded_gated,
            activation.clamped_gated,
            activation.sparse_gated,
            activation.xielu,
            linear.pack_linear,
            linear.linear,
            linear.hidden,
            linear.logits,
            collective.row_peaks,
            collective.linear_partial,
            collective.linear_total,
            lora.allocate_lora,
            lora.load_lora,
            lora.lora,
            lora.lora_partial,
            lora.lora_total,
            lora.lora_embed,
            kv.allocate_kv,
            kv.allocate_shared_kv,
            kv.export_kv,
            kv.import_kv,
            kv.copy_kv,
            kv.zero_kv,
            rotary.rope_store,
            rotary.rope_queries,
            rotary.mix_axes,
            rotary.scale_queries,
            attention.plan_attention,
            attention.attend,
            prompts.plan_prompts,
            prompts.attend_prompts,
            prompts.attend_relative,
            latent.pack_heads,
            latent.heads_linear,
            latent.latent_store,
            latent.plan_latent,
            latent.latent_attend,
            indexed.plan_indexed,
            indexed.index_select,
            indexed.indexed_attend,
            indexed.block_select,
            indexed.block_attend,
            state.short_conv,
            state.mamba_scan,
            state.mamba2_scan,
            state.gated_delta,
            state.channel_delta,
            state.gated_linear,
            state.gated_norm,
            streams.join_streams,
            streams.enter_streams,
            streams.predict_streams,
            streams.correct_streams,
            streams.add_to_streams,
            streams.add_matched,
            moe.pack_experts,
            routing.route,
            moe.moe,
            pooling.sum_chunks,
            grammar_mask.mask_logits,
            edits.bias_logits,
            edits.penalize,
            edits.forbid_words,
            sample.greedy,
            sample.draw,
            sample.truncate,
            sample.rank,
        )
    }
)
"""Name -> op."""
