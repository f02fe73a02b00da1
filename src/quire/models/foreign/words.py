"""Words of `quire show` about a model that runs through transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from quire.models.foreign.spec import (
    ForeignAttention,
    ForeignCache,
    ForeignDecoder,
    ForeignState,
)
from quire.models.kv_pool import token_bytes
from quire.models.layer_memory import NumberBytes


def foreign_lines(d: ForeignDecoder, weight_bytes: int, number: NumberBytes) -> Iterator[str]:
    """Figures, then the attention of each layer; equal consecutive layers are shown once."""
    yield f"implementation    transformers {d.release}, with Quire's attention and KV cache"
    size = d.num_parameters * weight_bytes / 2**30
    yield f"parameters        {d.num_parameters:,} ({size:.2f} GiB)"
    yield f"layers            {d.num_layers}"
    yield f"hidden width      {d.dim:,}"
    yield f"vocabulary        {d.vocab:,}"
    yield f"KV cache          {token_bytes(d.memories, number):,} bytes per token"
    yield from _costs(d)
    yield ""
    start = 0
    for layer, equal in groupby(replace(each, layer=0) for each in d.kept):
        count = len(list(equal))
        yield f"layers {start}..{start + count - 1}:" if count > 1 else f"layer {start}:"
        yield f"    {_kept(layer)}"
        start += count


def _costs(d: ForeignDecoder) -> Iterator[str]:
    """The price of running code that is not Quire's."""
    yield "cost              each step calls the model's Python code; no recorded steps or graphs"
    yield "                  transformers is imported at start, about 400 MB in two processes"
    yield "                  not possible: rounding of weights, adapters, drafts, several workers"
    own = len(d.linears) - len(d.open_linears)
    yield f"products          {own} linear layers with Quire's kernels, as they are stored"
    if d.caches:
        yield "                  a step copies all keys and values of its requests for each layer"
    if d.open_linears:
        count = len(d.open_linears)
        yield f"                  {count} with plain torch: the model's code reads their weights"


def _kept(kept: ForeignAttention | ForeignCache | ForeignState) -> str:
    if isinstance(kept, ForeignAttention):
        return _attention(kept)
    if isinstance(kept, ForeignState):
        return f"a state of {sum(kept.sizes):,} numbers in fp32, in transformers' own cache"
    return _cache(kept)


def _cache(c: ForeignCache) -> str:
    values = "" if c.value_dim == c.head_dim else f", values of {c.value_dim}"
    index = f", and chosen tokens by a key of {c.index_dim}" if c.index_dim else ""
    heads = f"{c.kv_heads} heads of {c.head_dim}{values}{index}"
    return f"transformers' own attention, one request at a time, over {heads}"


def _attention(a: ForeignAttention) -> str:
    seen = "all tokens before" if a.window is None else f"the last {a.window} tokens"
    cap = "" if a.softcap is None else f", scores capped at {a.softcap:g}"
    sinks = ", one sink per head" if a.sinks else ""
    values = "" if a.value_dim == a.head_dim else f", values of {a.value_dim}"
    heads = f"{a.heads} / {a.kv_heads} / {a.kv_heads} heads of {a.head_dim}{values}"
    return f"attention of {heads} over {seen}, scaled by {a.scale:g}{cap}{sinks}"
