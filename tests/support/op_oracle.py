"""All ops once more, as loops in numpy float64: what the plain-torch definitions are checked
against.

Nothing here shares a line or an idea of layout with `quire.ops`: a token, a head, an expert at a
time, and KV memory as two arrays over slots that hold NaN where nobody wrote. Slow, and only for
the small cases. The functions stand as a provider named "oracle".
"""

from __future__ import annotations

from quire.ops import Implementation
from tests.support import (
    op_oracle_edits,
    op_oracle_logits,
    op_oracle_masks,
    op_oracle_paged,
    op_oracle_rows,
)
from tests.support.compressed import oracle as compressed_oracle
from tests.support.lora import op_oracle_lora
from tests.support.recurrent import oracle as state_oracle
from tests.support.streams import oracle as streams_oracle

IMPLEMENTATIONS = tuple(
    Implementation(function.__name__, "oracle", function, lambda _: True, batch_invariant=True)
    for function in (
        op_oracle_rows.embed,
        op_oracle_rows.embed_packed,
        op_oracle_rows.norm,
        op_oracle_rows.add,
        op_oracle_rows.add_norm,
        op_oracle_rows.multiply,
        op_oracle_rows.scale_gate,
        op_oracle_rows.scale_heads,
        op_oracle_rows.modulate,
        op_oracle_rows.scale_queries,
        op_oracle_rows.mix_axes,
        op_oracle_rows.xielu,
        op_oracle_rows.pack_linear,
        op_oracle_rows.linear,
        op_oracle_rows.hidden,
        op_oracle_rows.logits,
        op_oracle_rows.row_peaks,
        op_oracle_rows.sum_chunks,
        op_oracle_rows.linear_partial,
        op_oracle_rows.linear_total,
        op_oracle_lora.allocate_lora,
        op_oracle_lora.load_lora,
        op_oracle_lora.lora,
        op_oracle_lora.lora_partial,
        op_oracle_lora.lora_total,
        op_oracle_lora.lora_embed,
        op_oracle_rows.pack_experts,
        op_oracle_rows.route,
        op_oracle_rows.route_softplus,
        op_oracle_rows.moe,
        op_oracle_paged.allocate_kv,
        op_oracle_paged.allocate_shared_kv,
        op_oracle_paged.export_kv,
        op_oracle_paged.import_kv,
        op_oracle_paged.copy_kv,
        op_oracle_paged.zero_kv,
        op_oracle_paged.rope_store,
        op_oracle_paged.rope_queries,
        op_oracle_paged.plan_attention,
        op_oracle_paged.attend,
        op_oracle_paged.plan_prompts,
        op_oracle_paged.attend_prompts,
        op_oracle_paged.attend_relative,
        op_oracle_paged.pack_heads,
        op_oracle_paged.heads_linear,
        op_oracle_paged.latent_store,
        op_oracle_paged.plan_latent,
        op_oracle_paged.latent_attend,
        op_oracle_paged.plan_indexed,
        op_oracle_paged.index_select,
        op_oracle_paged.indexed_attend,
        op_oracle_paged.block_select,
        op_oracle_paged.block_attend,
        state_oracle.short_conv,
        state_oracle.mamba_scan,
        state_oracle.mamba2_scan,
        state_oracle.gated_delta,
        state_oracle.channel_delta,
        state_oracle.gated_linear,
        state_oracle.gated_norm,
        *streams_oracle.ORACLE,
        *compressed_oracle.ORACLE,
        op_oracle_masks.mask_logits,
        op_oracle_edits.bias_logits,
        op_oracle_edits.penalize,
        op_oracle_edits.forbid_words,
        op_oracle_logits.greedy,
        op_oracle_logits.draw,
        op_oracle_logits.truncate,
        op_oracle_logits.rank,
    )
)
