"""Runs a model as the engine does: paged, chunked, several rows at once, in memory that is full of
NaN.

Blocks are taken in shuffled order, KV groups share the memory of their layer slots as the pool
does, and table entries that lie wholly behind a window point at a block of NaN that nobody may
read.
"""

from __future__ import annotations

import random
from dataclasses import fields
from functools import partial

import numpy as np
import torch

from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.models.layer_memory import NumberBytes
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.ops import (
    NO_BLOCK,
    Batch,
    GroupBatch,
    LayerLatents,
    LayerState,
    PromptBatch,
    StateBatch,
    select,
)
from quire.ops.step_rows import StepRows, cut_at_chunks
from quire.runner.kv_cache import KVCache

BLOCK = 4
TOLERANCE = 2e-5
"""On relative errors in float32; gelu and its tanh form differ by more."""


def load(folder, spec, *, dtype=torch.float32, **keywords):
    """The model; keywords are those of `load_model` and of `ModelOptions`."""
    ops = select(device="cpu", dtype=dtype, providers=["torch"])
    names = [field.name for field in fields(ModelOptions) if field.name in keywords]
    options = ModelOptions(**{name: keywords.pop(name) for name in names})
    return load_model(folder, spec, ops, dtype=dtype, options=options, **keywords)


class PagedRun:
    """Rows with all their blocks, and steps of one of `models`, whose layers the pool has."""

    def __init__(self, model, prompts, dtype=torch.float32, models=None, ops=None) -> None:
        self.model, self.prompts = model, prompts
        self.ops = ops or select(device="cpu", dtype=dtype, providers=["torch"])
        number = NumberBytes(dtype.itemsize, dtype.itemsize)
        memories = memories_of(m.spec for m in models or [model])
        self.pool = plan_kv_pool(memories, BLOCK, number)
        self.computed = [0] * len(prompts)
        self.steps = [0] * len(prompts)
        total = 1 + sum(_num_blocks(g, p) for p in prompts for g in self.pool.groups)
        self.poison = total - 1
        self.tables = self._tables(total)
        self.kv = self._memory(total, dtype)

    def step(self, counts, forward=None):
        """Compute the next counts[r] tokens of each row; returns their logits, row by row."""
        logits = self.logits(counts, self.model, forward)
        for r in logits:
            self.computed[r] += counts[r]
            self.steps[r] += 1
        return logits

    def logits(self, counts, model, forward=None):
        """The same with one of the models; the rows stay where they are."""
        rows = [r for r, n in enumerate(counts) if n]
        spans = {r: range(self.computed[r], self.computed[r] + counts[r]) for r in rows}
        ids = torch.cat([self.prompts[r][spans[r].start : spans[r].stop] for r in rows])
        positions = torch.tensor([p for r in rows for p in spans[r]])
        groups = [self._group(g, rows, spans) for g in range(len(self.pool.groups))]
        layer_groups = self.pool.layer_groups
        batch = Batch(ids, None, positions[None], groups, self.kv, layer_groups, len(ids))
        hidden = (forward or model.forward)(batch)
        pieces = model.logits(hidden.last).split([counts[r] for r in rows])
        return dict(zip(rows, pieces, strict=True))

    def _tables(self, total):
        free = list(range(total - 1))
        random.Random(3).shuffle(free)
        return [
            [[free.pop() for _ in range(_num_blocks(g, p))] for p in self.prompts]
            for g in self.pool.groups
        ]

    def _memory(self, total, dtype):
        cache = KVCache(ops=self.ops, pool=self.pool, num_blocks=total, dtype=dtype)
        for kv in {id(kv): kv for kv in cache.layers if kv is not None}.values():
            if isinstance(kv, LayerState):
                kv.data.fill_(0xFF)  # NaN in every type
                continue
            if isinstance(kv, LayerLatents):
                for part in kv.parts:
                    part.fill_(float("nan"))
                continue
            block = (2, kv.block_size, kv.kv_heads, kv.head_dim)
            self.ops.import_kv(kv, range(total), torch.full((total, *block), float("nan")))
        for group, tables in zip(self.pool.groups, self.tables, strict=True):
            if group.kind == "state":
                cache.zero([ring[0] for ring in tables])
        return cache.layers

    def _states(self, g, rows, spans):
        """A row's state is in the first block of its ring before its first step."""
        reads, writes = [], []
        for r in rows:
            ring, last = self.tables[g][r], len(spans[r]) - 1
            reads += [ring[self.steps[r] % 2]] + [NO_BLOCK] * last
            writes += [NO_BLOCK] * last + [ring[(self.steps[r] + 1) % 2]]
        return StateBatch(torch.tensor(reads), torch.tensor(writes))

    def _group(self, g, rows, spans):
        group = self.pool.groups[g]
        if group.kind == "state":
            return self._states(g, rows, spans)
        window, size = group.window, group.block_size
        width = max(len(self.tables[g][r]) for r in rows)
        table = torch.full((len(rows), width), self.poison, dtype=torch.int32)
        slots = []
        for i, r in enumerate(rows):
            blocks = self.tables[g][r]
            first = 0 if window is None else max(0, spans[r].start - window + 1) // size
            last = -(-spans[r].stop // size)
            table[i, first:last] = torch.tensor(blocks[first:last], dtype=torch.int32)
            slots += [blocks[p // size] * size + p % size for p in spans[r]]
        starts = np.cumsum([0] + [len(spans[r]) for r in rows]).astype(np.int32)
        lengths = np.array([spans[r].stop for r in rows], dtype=np.int32)
        if group.kind == "none":
            return PromptBatch(self.ops.plan_prompts(query_start=starts, seq_lens=lengths))
        if group.chunk is not None:
            step = StepRows(starts, lengths, table.numpy(), np.arange(len(rows)))
            cut = cut_at_chunks(step, block_size=size, chunk=group.chunk)
            starts, lengths = cut.query_start, cut.seq_lens
            window, table = None, torch.from_numpy(cut.block_table)
        make = self.ops.plan_indexed if group.is_indexed else self.ops.plan_latent
        if not group.has_latents:
            make = partial(self.ops.plan_attention, window=window)
        plan = make(query_start=starts, seq_lens=lengths, block_table=table, block_size=size)
        return GroupBatch(torch.tensor(slots), plan)


def _num_blocks(group, prompt):
    """How many blocks of a group a prompt takes: two states, one to read and one to write."""
    return 2 if group.kind == "state" else -(-len(prompt) // group.block_size)


def run_full(model, prompts, **keywords):
    """Logits of all rows, each prompt in one piece, all in one step."""
    out = PagedRun(model, prompts, **keywords).step([len(p) for p in prompts])
    return [out[r] for r in range(len(prompts))]


def run_chunked(model, prompts, seed=0, forward=None, ops=None):
    """Logits of all rows, computed in steps of 0 to 5 tokens per row."""
    run, rng = PagedRun(model, prompts, ops=ops), random.Random(seed)
    pieces = [[] for _ in prompts]
    while any(c < len(p) for c, p in zip(run.computed, prompts, strict=True)):
        left = [len(p) - c for c, p in zip(run.computed, prompts, strict=True)]
        counts = [min(n, rng.randint(0, 5)) for n in left]
        if any(counts):
            for r, logits in run.step(counts, forward).items():
                pieces[r].append(logits)
    return [torch.cat(p) for p in pieces]


def relative_error(got, expected):
    """The largest difference over the largest expected value; infinite for NaN."""
    worst = max((g - e).abs().max().item() for g, e in zip(got, expected, strict=True))
    size = max(e.abs().max().item() for e in expected)
    return worst / size if worst == worst else float("inf")
