"""`flash_attn_with_kvcache` of FlashAttention 3, written out: its parameters and its meaning.

What the real function would refuse or read out of bounds is an assertion. It reads keys through the
page table up to each row's length and no further, and computes in float64.
"""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    total, heads, width = q.shape
    pages, size, kv_heads, _ = k_cache.shape
    assert q.dtype in HALF and k_cache.dtype == v_cache.dtype == q.dtype
    assert v_cache.shape == k_cache.shape and heads % kv_heads == 0
    assert width % 8 == 0 and width <= 256
    assert q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == page_table.stride(1) == 1
    for integers in (cache_seqlens, page_table, cu_seqlens_q):
        assert integers.dtype is torch.int32
    rows = len(cache_seqlens)
    assert page_table.shape[0] == rows == len(cu_seqlens_q) - 1
    starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    assert starts[0] == 0 and starts[-1] == total
    assert max_seqlen_q == max(b - a for a, b in zip(starts, starts[1:], strict=False))
    out = torch.empty_like(q)
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        table = page_table[row, : -(-length // size)].tolist()
        assert all(0 <= page < pages for page in table), "reads a page that there is not"
        keys, values = (
            cache[table].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("ihd,jhd->hij", q[begin:end].double(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(length - (end - begin), length)[:, None]
        key = torch.arange(length)
        left, right = window_size
        sees = torch.ones(len(query), length, dtype=torch.bool)
        if causal or right >= 0:
            sees &= key <= query + (0 if causal else right)
        if left >= 0:
            sees &= key >= query - left
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)
    return out
