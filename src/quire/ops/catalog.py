"""All operations, and the namespace in which a model has the functions chosen for them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from quire.ops import activation, attention, collective, kv, rotary, routing
from quire.ops import embed as embeddings
from quire.ops import linear as products
from quire.ops import moe as experts
from quire.ops import norm as norms
from quire.ops.formats import lora as adapters
from quire.ops.mixers import compressed, indexed, latent, pooling, prompts, state, streams
from quire.ops.registry import Op
from quire.ops.sampling import edits, grammar_mask, sample


class Choice(NamedTuple):
    """The provider of an op, and why each better one is not used ("" if there is no better one)."""

    op: str
    provider: str
    why: str


class Ops:
    """The ops of one model: bound functions, called without any look-up.

    The class has the ops as they are defined, in the order in which a decoder uses them on the way
    to a token; an object has a function in front of each, with the same parameters.
    `batch_invariant`: a row's bits do not depend on what else is in the step, for a model that
    calls only the ops of all models; `invariance_reason` says why, or why not. `takes_rows`:
    `pack_linear` and `pack_experts` take weights as `RowStack`s, too.
    """

    choices: tuple[Choice, ...]
    batch_invariant: bool
    invariance_reason: str
    takes_rows: bool

    embed = embeddings.embed
    embed_packed = embeddings.embed_packed
    norm = norms.norm
    add = norms.add
    multiply = norms.multiply
    add_norm = norms.add_norm
    scale_gate = activation.scale_gate
    scale_heads = activation.scale_heads
    modulate = activation.modulate
    bounded_gated = activation.bounded_gated
    clamped_gated = activation.clamped_gated
    sparse_gated = activation.sparse_gated
    xielu = activation.xielu
    pack_linear = products.pack_linear
    linear = products.linear
    hidden = products.hidden
    logits = products.logits
    row_peaks = collective.row_peaks
    linear_partial = collective.linear_partial
    linear_total = collective.linear_total
    allocate_lora = adapters.allocate_lora
    load_lora = adapters.load_lora
    lora = adapters.lora
    lora_partial = adapters.lora_partial
    lora_total = adapters.lora_total
    lora_embed = adapters.lora_embed
    allocate_kv = kv.allocate_kv
    allocate_shared_kv = kv.allocate_shared_kv
    export_kv = kv.export_kv
    import_kv = kv.import_kv
    copy_kv = kv.copy_kv
    zero_kv = kv.zero_kv
    rope_store = rotary.rope_store
    rope_queries = rotary.rope_queries
    mix_axes = rotary.mix_axes
    scale_queries = rotary.scale_queries
    plan_attention = attention.plan_attention
    attend = attention.attend
    plan_prompts = prompts.plan_prompts
    attend_prompts = prompts.attend_prompts
    attend_relative = prompts.attend_relative
    pack_heads = latent.pack_heads
    heads_linear = latent.heads_linear
    latent_store = latent.latent_store
    plan_latent = latent.plan_latent
    latent_attend = latent.latent_attend
    plan_indexed = indexed.plan_indexed
    index_select = indexed.index_select
    indexed_attend = indexed.indexed_attend
    block_select = indexed.block_select
    block_attend = indexed.block_attend
    recent_store = compressed.recent_store
    entry_select = compressed.entry_select
    recent_attend = compressed.recent_attend
    short_conv = state.short_conv
    mamba_scan = state.mamba_scan
    mamba2_scan = state.mamba2_scan
    gated_delta = state.gated_delta
    channel_delta = state.channel_delta
    gated_linear = state.gated_linear
    gated_norm = state.gated_norm
    join_streams = streams.join_streams
    enter_streams = streams.enter_streams
    predict_streams = streams.predict_streams
    correct_streams = streams.correct_streams
    add_to_streams = streams.add_to_streams
    add_matched = streams.add_matched
    collapse_streams = streams.collapse_streams
    expand_streams = streams.expand_streams
    pack_experts = experts.pack_experts
    route = routing.route
    route_softplus = routing.route_softplus
    moe = experts.moe
    sum_chunks = pooling.sum_chunks
    mask_logits = grammar_mask.mask_logits
    bias_logits = edits.bias_logits
    penalize = edits.penalize
    forbid_words = edits.forbid_words
    greedy = sample.greedy
    draw = sample.draw
    truncate = sample.truncate
    rank = sample.rank

    def __init__(self, **functions_and_facts: Any) -> None:
        missing = {*CATALOG, *Ops.__annotations__} ^ set(functions_and_facts)
        assert not missing, f"not as the catalog has them: {sorted(missing)}"
        vars(self).update(functions_and_facts)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to {name}")

    def replace(self, **changes: Any) -> Ops:
        """A copy with other functions, or other facts."""
        return Ops(**vars(self) | changes)

    def report(self) -> list[Choice]:
        """(op, provider, why the better were refused) for every op, as start-up prints it."""
        return list(self.choices)


CATALOG: MappingProxyType[str, Op[Any]] = MappingProxyType(
    {name: value for name, value in vars(Ops).items() if isinstance(value, Op)}
)
"""Name -> op."""
