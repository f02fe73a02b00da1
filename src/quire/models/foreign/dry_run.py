"""Finds out what a model of transformers needs, by calling it once without weights.

The model is built without memory (hollow.py). A pass over two tokens then shows each layer's heads,
and the masks that transformers would make show its window. What paged attention could not express
is refused here, before anything is loaded.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.errors import UnsupportedArchitecture
from quire.models.foreign import hollow
from quire.models.foreign.attention import ATTENTION, STEP, attend
from quire.models.foreign.library import (
    IN_A_CACHE,
    WITHOUT_MEMORY,
    MoreInCache,
    OwnAttention,
    layer_kinds,
    library_config,
    model_class,
    refusal,
    require,
    silenced,
    use_attention,
)
from quire.models.foreign.own_caches import find_caches
from quire.models.foreign.parts import POSITIONS, split
from quire.models.foreign.spec import (
    ForeignAttention,
    ForeignCache,
    ForeignDecoder,
    ForeignState,
)

_DRY_RUN = "quire_dry_run"
"""The name of our attention when masks are made, too."""
_OWN = "quire_own"
"""The name of our attention in a dry run of a model's own, if that calls an interface at all."""
_FAR = 1 << 18
"""A position from which windows are measured."""
_NOT_CAUSAL = "its tokens see those after them: it is not causal"
_WITHOUT_MEANING = frozenset(
    [
        "dropout",
        "position_ids",
        "position_embeddings",
        "past_key_values",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    ]
)
"""Keyword arguments that change nothing about attention over the KV cache."""
_UNDERSTOOD = frozenset(("mask", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"))


def describe_foreign(config: Mapping[str, Any]) -> ForeignDecoder:
    """Describe the model of a config.json as transformers runs it.

    Raises UnsupportedArchitecture, which says what the model has that cannot run, or LoadError.
    """
    require()
    import transformers

    register()
    name = str((config.get("architectures") or [""])[0])
    kind = model_class(config)
    with silenced(), torch.inference_mode():
        model = hollow.build(kind, library_config(config), name, _DRY_RUN)
        num_parameters = sum(p.numel() for p in model.parameters())
        widest = hollow.widest(model)
        linears, experts = hollow.linears(model), hollow.experts(model)
        opened = hollow.empty(model)
        with hollow.NoProducts():
            passes = _passes(name, model)
        table = model.get_input_embeddings().weight
    widths = [(a.heads + 2 * a.kv_heads) * a.head_dim for a in passes.calls]
    widths += [2 * cache.numbers for cache in passes.caches]
    return ForeignDecoder(
        architecture=name,
        release=transformers.__version__,
        vocab=passes.vocab,
        dim=table.shape[1],
        calls=passes.calls,
        num_parameters=num_parameters,
        widest=max(widest, *widths),
        linears=linears,
        open_linears=tuple(sorted(opened)),
        experts=experts,
        first_position=passes.first_position,
        num_positions=passes.num_positions,
        position_table=passes.position_table,
        caches=passes.caches,
        states=passes.states,
    )


class _Passes(NamedTuple):
    """The findings of passes without weights: see `ForeignDecoder`."""

    vocab: int
    calls: tuple[ForeignAttention, ...] = ()
    caches: tuple[ForeignCache, ...] = ()
    states: tuple[ForeignState, ...] = ()
    first_position: int = 0
    num_positions: int | None = None
    position_table: str | None = None


def _passes(name: str, model: Any) -> _Passes:
    try:
        return _through_interface(name, model)
    except OwnAttention as error:
        body, head = split(name, model)
        use_attention(model, _OWN)
        masks, handles = _noted_masks(body)
        try:
            caches, states = find_caches(name, body)
        except MoreInCache:
            raise
        except UnsupportedArchitecture:
            raise error from None
        finally:
            for handle in handles:
                handle.remove()
        if "later" in masks:
            raise refusal(name, _NOT_CAUSAL) from None
        width = model.get_input_embeddings().weight.shape[1]
        logits = head(inputs_embeds=torch.zeros(1, 1, width)).logits
        return _Passes(logits.shape[-1], caches=caches, states=states)


def _noted_masks(body: Any) -> tuple[set[object], list[Any]]:
    """The windows of masks (`_mask`) that modules are called with, and handles of the hooks."""
    found: set[object] = set()

    def note(_: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        found.update(getattr(value, "quire_window", None) for value in (*inputs, *named.values()))

    modules = list(body.modules())
    return found, [m.register_forward_pre_hook(note, with_kwargs=True) for m in modules]


def _attend_to_nothing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _through_interface(name: str, model: Any) -> _Passes:
    if model._is_stateful:
        why = "its layers keep a recurrent state, which transformers has in a cache"
        raise refusal(name, why, OwnAttention)
    others = sorted({*layer_kinds(model.config.get_text_config())}.intersection(IN_A_CACHE))
    if others:
        what = f"layers of the type {', '.join(others)} keep something else"
        raise refusal(name, what, OwnAttention)
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv1d)]
    if convolutions:
        raise refusal(name, f"{convolutions[0]} mixes tokens outside of attention", OwnAttention)
    position_table = _position_table(name, model)
    calls, logits = _tried(name, model, position_table is None)
    first, num_positions = 0, None
    if position_table is None:
        first, num_positions = _counted_positions(name, model)
    return _Passes(logits.shape[-1], calls, (), (), first, num_positions, position_table)


def register() -> None:
    """Make our attention known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionInterface.register(_DRY_RUN, attend)
    AttentionInterface.register(_OWN, _attend_to_nothing)
    for name in (_DRY_RUN, _OWN):
        AttentionMaskInterface.register(name, _mask)


class _Recorder:
    """Notes how each layer calls its attention."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.calls: list[ForeignAttention] = []

    def attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, facts: Mapping[str, Any]
    ) -> Tensor:
        """Return zeros. Raises UnsupportedArchitecture for what cannot be expressed."""
        others = facts.keys() - _WITHOUT_MEANING - _UNDERSTOOD
        odd = [key for key in others if facts[key] is not None and facts[key] is not False]
        if odd:
            what = f"its attention gets {', '.join(sorted(odd))}, which is not implemented"
            self._refuse(what, OwnAttention)
        if facts.get("is_causal") is False:
            self._refuse("its attention is not causal")
        number = getattr(layer, "layer_idx", None)
        if not isinstance(number, int):
            self._refuse("a layer that calls attention has no number (layer_idx)")
        self.calls.append(self._seen(int(number), q, k, v, facts))  # type: ignore[arg-type]
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def _seen(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, facts: Mapping[str, Any]
    ) -> ForeignAttention:
        (_, heads, _, head_dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[3]
        if k.shape[3] != head_dim or value_dim > head_dim or heads % kv_heads:
            what = "the shapes of its queries, keys and values do not fit together"
            self._refuse(what, OwnAttention)
        scale, sinks = facts.get("scaling"), facts.get("s_aux")
        return ForeignAttention(
            layer=number,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            scale=head_dim**-0.5 if scale is None else float(scale),
            window=self._window(facts["mask"]),
            softcap=facts.get("softcap"),
            sinks=sinks is not None,
        )

    def _window(self, mask: object) -> int | None:
        described = getattr(mask, "quire_window", None)
        if described is None:
            self._refuse("it makes or changes the masks of its attention by itself", OwnAttention)
        if described == "later":
            self._refuse(_NOT_CAUSAL)
        if described == "odd":
            what = "its attention is neither causal over all tokens nor over a window"
            self._refuse(what, OwnAttention)
        return described or None

    def _refuse(
        self, why: str, kind: type[UnsupportedArchitecture] = UnsupportedArchitecture
    ) -> None:
        raise refusal(self._architecture, why, kind)


def _mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **_: Any) -> Any:
    """transformers' mask function of the dry run: zeros with the window as an attribute, 0 for
    none, "later" where tokens see those after them, "odd" for what is not a window.
    """
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool)
    # of two queries: where all is seen the number grows with the position, a window's does not
    sizes = [_seen_from(mask_function, query) for query in (_FAR - 1, _FAR - 2)]
    if sizes == [_FAR, _FAR - 1]:
        window: object = 0
    elif "later" in sizes:
        window = "later"
    else:
        window = sizes[0] if sizes[0] == sizes[1] and isinstance(sizes[0], int) else "odd"
    mask.quire_window = window  # type: ignore[attr-defined]
    return mask


def _seen_from(mask_function: Callable[..., Tensor], query: int) -> int | str:
    """Number of last keys that a query sees; "later": also some after it; "odd": others."""
    zero, keys = torch.tensor(0), torch.arange(_FAR + 1)
    seen = mask_function(zero, zero, torch.tensor(query), keys).expand(keys.shape)
    if bool(seen[query + 1 :].any()):
        return "later"
    count = int(seen.sum())
    is_last = count > 0 and bool(seen[query + 1 - count : query + 1].all())
    return count if is_last else "odd"


def _position_table(name: str, model: Any) -> str | None:
    """The module to which a body hands positions it counts itself; None: it takes positions."""
    body, _ = split(name, model)
    if POSITIONS in inspect.signature(body.forward).parameters:
        return None
    found: Counter[str] = Counter()

    def note(at: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            found[at] += isinstance(named.get(POSITIONS), Tensor)

        return hook

    handles = [
        module.register_forward_pre_hook(note(at), with_kwargs=True)
        for at, module in body.named_modules()
        if at
    ]
    try:
        _called(body, _Unseen(), has_positions=False)
    except Exception as error:
        raise _failed(name, error) from error
    finally:
        for handle in handles:
            handle.remove()
    tables = [at for at, count in found.items() if count]
    if len(tables) != 1 or found[tables[0]] != 1:
        why = f"it takes no positions ({POSITIONS}), and counts them by itself"
        raise refusal(name, why, OwnAttention)
    return tables[0]


def _tried(
    name: str, model: Any, has_positions: bool
) -> tuple[tuple[ForeignAttention, ...], Tensor]:
    """The calls of attention in a pass over two tokens, and its logits [1, 2, V]."""
    body, head = split(name, model)
    recorder = _Recorder(name)
    try:
        hidden = _called(body, recorder, has_positions=has_positions)
        if not recorder.calls:
            why = "its attention does not go through transformers' attention interface"
            raise refusal(name, why, OwnAttention)
        logits: Tensor = head(inputs_embeds=hidden).logits
        use_attention(model, ATTENTION)
        # no masks are made for our attention, and without them a layer may take another path
        _called(body, again := _Unmasked(recorder.calls), has_positions=has_positions)
    except UnsupportedArchitecture:
        raise
    except Exception as error:
        raise _failed(name, error) from error
    calls = tuple(recorder.calls)
    expected = _layers_with_attention(model.config.get_text_config())
    if {a.layer for a in calls} != expected and len(calls) != len(
        expected
    ):  # loops count as layers
        raise refusal(name, "not every layer calls the attention interface", OwnAttention)
    if again.count != len(calls):
        what = "without masks its layers call attention differently"
        raise refusal(name, what, OwnAttention)
    return calls, logits


def _failed(name: str, error: Exception) -> UnsupportedArchitecture:
    what = f"{type(error).__name__}: {error}"
    return refusal(name, f"calling it with Quire's attention fails ({what})", OwnAttention)


def _layers_with_attention(config: Any) -> set[int]:
    """The numbers of the decoder's layers with attention; some configs count encoders' too."""
    layers = getattr(config, "decoder_layers", None)
    kinds = getattr(config, "layer_types", None) or ()
    without = {i for i, kind in enumerate(kinds) if kind in WITHOUT_MEMORY}
    return set(range(config.num_hidden_layers if layers is None else layers)) - without


class _Unmasked:
    """Counts the calls of a pass without masks that are those of one with masks."""

    def __init__(self, calls: Sequence[ForeignAttention]) -> None:
        self._expected = iter(calls)
        self.count = 0

    def attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, facts: Mapping[str, Any]
    ) -> Tensor:
        """Return zeros."""
        seen = next(self._expected)
        expected = seen.layer, seen.heads, seen.kv_heads, seen.head_dim
        number: Any = layer.layer_idx
        is_same = (number, q.shape[1], k.shape[1], q.shape[3]) == expected
        self.count += is_same and facts["mask"] is None
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


class _Unseen:
    """Attention to nothing."""

    def attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, facts: Mapping[str, Any]
    ) -> Tensor:
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


def _counted_positions(name: str, model: Any) -> tuple[int, int | None]:
    """Offset that the model adds to positions when it counts them by itself, and the size of its
    table then (None: no table tells). RoBERTa's begin after the padding token's id.
    """
    body, _ = split(name, model)
    given, own = (_looked_up(name, body, has_positions) for has_positions in (True, False))
    for module, rows in given.items():
        if bool((own[module] == own[module][..., :1]).all()):
            continue  # tokens or types, or a buffer of positions, which has no memory here
        added = (own[module] - rows).unique().tolist()
        if added == [0]:
            continue
        if len(added) > 1 or added[0] < 0:
            what = "it counts positions by itself in a way that is not known"
            raise refusal(name, what, OwnAttention)
        return added[0], module.num_embeddings - added[0]
    return 0, None


def _looked_up(name: str, body: Any, has_positions: bool) -> dict[nn.Embedding, Tensor]:
    """The rows of each table that a pass over two tokens looks up."""
    found: dict[nn.Embedding, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, inputs: found.update({m: inputs[0]}))
        for module in body.modules()
        if isinstance(module, nn.Embedding)
    ]
    padding = getattr(body.config.get_text_config(), "pad_token_id", None)
    try:
        # no padding, which some models would count among the tokens
        _called(body, _Unseen(), token=int(padding == 0), has_positions=has_positions)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        why = f"it cannot count positions by itself ({what})"
        raise refusal(name, why, OwnAttention) from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _called(body: Any, step: object, *, token: int = 0, has_positions: bool = True) -> Tensor:
    ids = torch.full((1, 2), token)
    positions = {POSITIONS: torch.arange(2)[None]} if has_positions else {}
    outputs = body(input_ids=ids, **positions, use_cache=False, **{STEP: step})
    hidden: Tensor = outputs.last_hidden_state
    return hidden
