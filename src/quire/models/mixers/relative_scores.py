"""Scores that depend on the distance of a key from its query, as tables of an attention that runs
over whole prompts: made once, of weights and of which distances have a row in common.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.alibi import alibi_slopes
from quire.models.maker import Maker
from quire.models.positions import BucketBias, DisentangledScores, DistanceScores
from quire.models.spec import Attention, Norm
from quire.ops import LinearWeight, RelativeScores


def make_shared_table(make: Maker, scores: DistanceScores) -> Tensor:
    """Take the table that all layers share, normed where it has a norm."""
    table = make.tensor("distances.weight")
    if not isinstance(scores, DisentangledScores) or scores.eps is None:
        return table
    norm = make.norm("distances.norm", Norm("layer", scores.eps, bias=True))
    normed: Tensor = make.ops.norm(table, norm)
    return normed


def make_relative_scores(
    make: Maker, at: str, a: Attention, qkv: LinearWeight, table: Tensor | None
) -> RelativeScores | None:
    """Addend of distances to the scores of the attention whose leaves' names begin with `at`; None:
    nothing. `qkv` is its packed product, `table` that of all layers.
    """
    if a.alibi is not None:
        assert a.distances is None, "one kind of scores by distances"
        return _linear_bias(make, a)
    if a.distances is None:
        return None
    if isinstance(a.distances, BucketBias):
        own = make.tensor(at + "distances.weight") if not a.distances.is_shared else table
        assert own is not None, "a table of all layers comes first"
        columns = bucket_columns(a.distances)
        return RelativeScores(columns.to(make.device), bias=own.float().t().contiguous())
    assert table is not None, "a table of all layers comes first"
    return _disentangled(make, at, a, a.distances, qkv, table)


def _linear_bias(make: Maker, a: Attention) -> RelativeScores:
    """Minus slope * distance to both sides."""
    assert a.alibi is not None, "linear biases"
    reach = make.max_model_len - 1
    slopes = torch.tensor(alibi_slopes(a.alibi, a.heads), device=make.device)
    distances = torch.arange(-reach, reach + 1, device=make.device).abs()
    sizes = torch.arange(reach + 1, device=make.device)
    return RelativeScores(distances, bias=-slopes[:, None] * sizes)


def _disentangled(
    make: Maker, at: str, a: Attention, d: DisentangledScores, qkv: LinearWeight, table: Tensor
) -> RelativeScores:
    ops, width = make.ops, a.heads * a.head_dim
    assert a.kv_heads == a.heads, "a key for each query"
    keys: Tensor | None = None
    queries: Tensor | None = None
    if d.shares_products:
        q, k, _ = ops.linear(table, qkv).split((width, width, width), 1)
        keys, queries = k if d.has_keys else None, q if d.has_queries else None
    else:
        parts = (("position_k", d.has_keys), ("position_q", d.has_queries))
        keys, queries = (
            ops.linear(table, make.linear(at + name, at + name, is_adaptable=False))
            if has
            else None
            for name, has in parts
        )
    tables = {}
    for name, rows in (("keys", keys), ("queries", queries)):
        if rows is not None:
            tables[name] = rows.view(-1, a.heads, a.head_dim).transpose(0, 1).contiguous()
            make.keep(f"{at}distances.{name}", tables[name])
    return RelativeScores(span_columns(d).to(make.device), **tables)


def bucket_columns(bias: BucketBias) -> Tensor:
    """The bucket of each distance of a key from its query, from -R to R = `max_distance`."""
    side, reach = bias.buckets // 2, bias.max_distance
    exact = side // 2
    distances = torch.arange(-reach, reach + 1)
    sizes = distances.abs()
    # as the models were trained: in single precision, which decides at the buckets' borders
    steps = torch.log(sizes.float() / exact) / math.log(reach / exact) * (side - exact)
    far = (exact + steps.clamp(min=0).long()).clamp(max=side - 1)
    return torch.where(sizes < exact, sizes, far) + side * (distances > 0)


def span_columns(d: DisentangledScores) -> Tensor:
    """The row of each distance of a key from its query: the last rows are of keys before it."""
    reach = d.span if d.max_distance is None else d.max_distance
    behind = -torch.arange(-reach, reach + 1)
    rows = behind if d.max_distance is None else _logarithmic(behind, d.span, d.max_distance)
    return (rows + d.span).clamp(0, 2 * d.span - 1)


def _logarithmic(distances: Tensor, span: int, max_distance: int) -> Tensor:
    """Distances within half the span as they are, farther ones by their logarithm."""
    half, sizes = span // 2, distances.abs()
    # in single precision, as transformers has it: its rounding decides at the borders of rows
    rate = torch.log(torch.tensor((max_distance - 1) / half))
    steps = torch.ceil(torch.log(sizes.clamp(min=half) / half) / rate * (half - 1)) + half
    return torch.where(sizes <= half, distances, (steps * distances.sign()).long())
