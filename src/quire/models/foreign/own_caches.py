"""Models whose attention is their own, one request at a time through transformers' cache.

A model that does not call transformers' attention interface, makes its masks or counts positions by
itself, or keeps more than keys and values is right where it gets what it was written for: one text,
and a cache of the tokens before. Such a cache is filled from a request's blocks for each pass, and
what the pass adds to it goes back into them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedArchitecture
from quire.models.foreign.library import (
    IN_A_CACHE,
    WITHOUT_MEMORY,
    MoreInCache,
    layer_kinds,
    refusal,
)
from quire.models.foreign.spec import ForeignCache, ForeignState
from quire.ops import NO_BLOCK, Batch, GroupBatch, LayerLatents, LayerState, StateBatch
from quire.ops.attention_plan import PlainPlan
from quire.ops.mixers.indexed import rows_at, store_rows

_TOKENS = 2
"""Tokens of the pass that shows what is cached."""


def find_caches(
    architecture: str, body: Any
) -> tuple[tuple[ForeignCache, ...], tuple[ForeignState, ...]]:
    """Find the contents of a cache by a pass of a body without weights over two tokens: keys and
    values of each token, and states. Raises UnsupportedArchitecture where it is something else.
    """
    text = body.config.get_text_config()
    cache = _own_cache(text)
    if not {type(layer).__name__ for layer in cache.layers} <= _LAYERS:
        raise refusal(architecture, "its cache has layers of another kind")
    try:
        _passed(body, cache, {"input_ids": torch.zeros(1, _TOKENS, dtype=torch.int64)})
    except UnsupportedArchitecture:
        raise
    except Exception as error:  # whatever the model's code raises
        what = f"{type(error).__name__}: {error}"
        raise refusal(architecture, f"calling it with a cache fails ({what})") from error
    layers = [(n, each) for n, each in enumerate(cache.layers) if type(each).__name__ in _LAYERS]
    caches = tuple(_cached(architecture, n, each) for n, each in layers if _has_keys(each))
    states = tuple(found for n, each in layers if (found := _state(n, each)) is not None)
    without = sum(kind in WITHOUT_MEMORY for kind in layer_kinds(text))
    kept = {c.layer for c in caches} | {s.layer for s in states}
    if len(kept) + without != len(cache.layers) or not caches:
        raise refusal(architecture, "not every layer keeps keys and values in a cache")
    return caches, states


class OwnCaches:
    """Runs a body over a batch, whose memory is that of `caches`, then of `states`."""

    def __init__(
        self, body: Any, caches: Sequence[ForeignCache], states: Sequence[ForeignState]
    ) -> None:
        self._body, self._caches, self._states = body, caches, states
        self._text = body.config.get_text_config()
        self._types: dict[tuple[int, int], torch.dtype] = {}

    def forward(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Hidden states [T, C] of inputs [1, T, ...]; what is kept goes into the batch's blocks."""
        hidden: dict[int, Tensor] = {}
        of_groups = self._rows_of_groups(batch)
        for first, (last, _) in next(iter(of_groups.values())).items():
            before = {g: rows[first][1][: first - last] for g, rows in of_groups.items()}
            cache = self._filled(batch, before, first)
            for start, stop in self._pieces(batch, first, last):
                own = {name: values[:, start:stop] for name, values in inputs.items()}
                hidden[start] = _passed(self._body, cache, own)[0]
                self._keep_states(batch, cache, stop - 1)
            self._keep(batch, cache, first, last)
        # rows with one new token come first, wherever they are in the step
        return torch.cat([hidden[start] for start in sorted(hidden)])

    def _rows_of_groups(self, batch: Batch) -> dict[int, dict[int, tuple[int, Tensor]]]:
        """The end of each row of the step and the lanes of its tokens, by group of caches and the
        row's first new token. The layers of one kind may be in several groups.
        """
        found: dict[int, dict[int, tuple[int, Tensor]]] = {}
        for number in dict.fromkeys(batch.layer_groups[: len(self._caches)]):
            group = batch.groups[number]
            assert isinstance(group, GroupBatch) and isinstance(group.plan, PlainPlan), "lanes"
            found[number] = {first: (last, lanes) for first, last, lanes in _rows(group.plan)}
        return found

    def _pieces(self, batch: Batch, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The new tokens of a row, cut after those whose states are kept."""
        ends = [last - 1]
        if self._states:
            writes = self._states_of(batch, 0).writes[first:last]
            ends = [*(first + (writes != NO_BLOCK).nonzero().flatten()).tolist(), last - 1]
        start = first
        for end in ends:
            if start <= end:
                yield start, end + 1
            start = end + 1

    def _states_of(self, batch: Batch, at: int) -> StateBatch:
        group = batch.groups[batch.layer_groups[len(self._caches) + at]]
        assert isinstance(group, StateBatch), "states"
        return group

    def _filled(self, batch: Batch, before: Mapping[int, Tensor], first: int) -> Any:
        """A cache of the tokens in these lanes by group, and of the state before token `first`."""
        cache = _own_cache(self._text, self._caches)
        # a text that begins has neither tokens nor states before it
        if not any(map(len, before.values())):
            return cache
        for place, c in enumerate(self._caches):
            memory, lanes = _memory(batch, place), before[batch.layer_groups[place]]
            rows = rows_at(memory.data, lanes)
            keys, values = rows.split((c.kv_heads * c.head_dim, c.kv_heads * c.value_dim), 1)
            cache.update(*(_by_head(part, c.kv_heads) for part in (keys, values)), c.layer)
            if c.index_dim:
                assert memory.keys is not None, "a layer that chooses has keys for it"
                cache.layers[c.layer].update_indexer(rows_at(memory.keys, lanes)[None])
        for at, s in enumerate(self._states):
            numbers = self._numbers(batch, at)[self._states_of(batch, at).reads[first]]
            layer, count = cache.layers[s.layer], len(s.convolved)
            shapes = (*s.convolved, *s.recurrent)
            for i, (part, (number, shape)) in enumerate(
                zip(numbers.split(s.sizes), shapes, strict=True)
            ):
                state = part.view(shape).to(self._types[at, i])
                name = "conv_states" if i < count else "recurrent_states"
                layer.lazy_initialization(**{name: state, "state_idx": number})
                getattr(layer, name)[number].copy_(state)
                layer.has_previous_state[number] = True
        return cache

    def _keep(self, batch: Batch, cache: Any, first: int, last: int) -> None:
        """Store what a cache has of its last tokens, which are those from `first` to `last`."""
        count = last - first
        for place, c in enumerate(self._caches):
            group = batch.groups[batch.layer_groups[place]]
            assert isinstance(group, GroupBatch), "tokens"
            slots = group.slots[first:last]
            memory, layer = _memory(batch, place), cache.layers[c.layer]
            parts = (layer.keys, layer.values)
            rows = torch.cat([_by_token(part[:, :, -count:]) for part in parts], 1)
            store_rows(memory.data, slots, rows.to(memory.data.dtype))
            if c.index_dim:
                assert memory.keys is not None, "a layer that chooses has keys for it"
                added = layer.indexer_keys[0, -count:]
                store_rows(memory.keys, slots, added.to(memory.keys.dtype))

    def _keep_states(self, batch: Batch, cache: Any, token: int) -> None:
        """Store the states after a token where they are to be kept."""
        for at, s in enumerate(self._states):
            block = int(self._states_of(batch, at).writes[token])
            if block == NO_BLOCK:
                return
            layer = cache.layers[s.layer]
            parts = [layer.conv_states[number] for number, _ in s.convolved]
            parts += [layer.recurrent_states[number] for number, _ in s.recurrent]
            # blocks hold float32: a state gets its type back when a cache is filled
            self._types.update({(at, i): part.dtype for i, part in enumerate(parts)})
            numbers = self._numbers(batch, at)
            numbers[block] = torch.cat([part.flatten().float() for part in parts])

    def _numbers(self, batch: Batch, at: int) -> Tensor:
        """A state's numbers in each block."""
        memory = batch.kv[len(self._caches) + at]
        assert isinstance(memory, LayerState), "a state for a request"
        return memory.view(0, (sum(self._states[at].sizes),), torch.float32)


def _memory(batch: Batch, place: int) -> LayerLatents:
    memory = batch.kv[place]
    assert isinstance(memory, LayerLatents), "rows of keys and values"
    return memory


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """[n, K * D] -> [1, K, n, D]."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)[None]


def _by_token(states: Tensor) -> Tensor:
    """[1, K, n, D] -> [n, K * D]."""
    return states[0].transpose(0, 1).flatten(1)


def _rows(plan: PlainPlan) -> Iterator[tuple[int, int, Tensor]]:
    """The first and last new token of each row of a step, and the lanes of all of its tokens."""
    for rows in plan.decode:
        lanes = rows.lanes.view(len(rows.spans), -1)
        tokens = rows.tokens
        if isinstance(tokens, slice):
            tokens = torch.arange(tokens.start, tokens.stop)
        for row, token in enumerate(tokens.tolist()):
            yield token, token + 1, lanes[row, : int(rows.spans[row])]
    for part in plan.prefill:
        yield part.tiles[0].tokens.start, part.tiles[-1].tokens.stop, part.lanes


def _own_cache(text: Any, filled: Sequence[ForeignCache] | None = None) -> Any:
    """transformers' cache of a configuration. Where it is to be `filled`, its windows keep all
    tokens: the model's masks hide those that are too far away.
    """
    from transformers import DynamicCache, cache_utils

    if not {*layer_kinds(text)}.intersection(IN_A_CACHE):
        return DynamicCache()
    cache = DynamicCache(config=text)
    if filled is None:
        return cache
    whole: dict[str, Any] = {
        "DynamicSlidingWindowLayer": cache_utils.DynamicLayer,
        "LinearAttentionAndSlidingWindowAttentionLayer": (
            cache_utils.LinearAttentionAndFullAttentionLayer
        ),
    }
    layers: list[Any] = cache.layers
    for at, layer in enumerate(layers):
        if (kind := whole.get(type(layer).__name__)) is not None:
            has_states = hasattr(layer, "number_of_states")
            layers[at] = kind(layer.number_of_states) if has_states else kind()
    return cache


_LAYERS = frozenset(
    (
        *("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"),
        *("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"),
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)
"""Classes of a cache's layers that are known here."""


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _state(number: int, layer: Any) -> ForeignState | None:
    """The states that a layer keeps of a request, if any."""
    parts = [
        tuple((i, tuple(state.shape)) for i, state in states.items() if state is not None)
        for states in (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
    ]
    return ForeignState(number, *parts) if any(parts) else None


def _passed(body: Any, cache: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    outputs = body(**inputs, **{_cache_argument(body): cache}, use_cache=True)
    hidden: Tensor = outputs.last_hidden_state
    return hidden


def _cache_argument(body: Any) -> str:
    """The name of the cache among the arguments of a body; older releases have another one."""
    named = inspect.signature(body.forward).parameters
    found = next((name for name in ("cache", "past_key_values") if name in named), None)
    if found is None:
        raise refusal(type(body).__name__, "it takes no cache")
    return found


def _cached(architecture: str, number: int, layer: Any) -> ForeignCache:
    keys, values = layer.keys, layer.values
    index = getattr(layer, "indexer_keys", None)
    shapes = [states.shape for states in (keys, values)]
    if any(len(s) != 4 or s[0] != 1 or s[2] != _TOKENS for s in shapes) or (
        keys.shape[1] != values.shape[1]
        or getattr(layer, "indexer_position_ids", None) is not None
        or (index is not None and (index.dim() != 3 or index.shape[1] != _TOKENS))
    ):
        what = "its cache has more than keys and values of each token"
        raise refusal(architecture, what, MoreInCache)
    return ForeignCache(
        layer=number,
        kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        value_dim=values.shape[3],
        index_dim=0 if index is None else index.shape[2],
    )
