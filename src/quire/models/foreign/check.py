"""Runs a short text through transformers alone and through the paged cache, and compares.

Whatever mixes tokens outside of attention, counts positions by itself, or depends on a mask that is
not made shows here, before the model serves: the text is packed after another one, and its end
comes in a step of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.errors import LoadError
from quire.models.foreign.attention import ATTENTION
from quire.models.foreign.library import refusal, use_attention
from quire.models.foreign.model import ForeignModel
from quire.models.foreign.spec import ForeignDecoder
from quire.ops import NO_BLOCK, Batch, GroupBatch, LayerBatch, Ops, StateBatch
from quire.ops.kv import BlockShape, KVShape, LatentShape, StateShape

logger = logging.getLogger(__name__)

_LENGTHS = (3, 8)
"""Tokens of the text that comes first, and of the one that is compared."""
_COMPARED = 1
_STEPS = (((0, 0, 3), (_COMPARED, 0, 5)), ((_COMPARED, 5, 8),))
"""Steps, each with the number of a text and the first and last of its tokens that it computes."""
LAST_STEP = 3
"""Tokens of the last of them, which takes as long as one in service."""
_BLOCK = 32
_MOST = {torch.float32: 0.02}
_MOST_ROUNDED, _MOST_OF_EXPERTS = 0.1, 0.5
"""Bounds of the logits' deviation. A wrong position gives 0.12 and more, a mixed-up token 0.3.
Rounding to 16 bits gives 0.01, but a near tie between experts that falls the other way gives as
much as a mistake, so that there only a warning can be given below a half.
"""
_MUCH = 0.1


Span = tuple[int, int, int]


class Expected(NamedTuple):
    """The ids of both texts, the compared one's logits [n, V], whether it chooses experts."""

    ids: Tensor
    logits: Tensor
    has_experts: bool


def own_logits(model: Any, spec: ForeignDecoder) -> Expected:
    """The logits of the text as transformers computes them with attention of its own; then the
    model has the attention that it runs with. Raises LoadError where it fails.
    """
    use_attention(model, "eager")
    text = _text(spec.vocab, model)
    ids = text[None, _LENGTHS[0] :]
    try:
        scores: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    except Exception as error:  # whatever the model's code raises
        what = f"{type(error).__name__}: {error}"
        raise LoadError(f"transformers fails to run the model with this config: {what}") from error
    finally:
        use_attention(model, ATTENTION if spec.calls else "eager")
    has_experts = any("expert" in name for name, _ in model.named_modules())
    return Expected(text, scores.float(), has_experts)


class Staging(Protocol):
    """Sends a step's arrays to a device: see `quire.runner.devices.device.Device`."""

    torch: torch.device

    def begin(self, arrays: Sequence[np.ndarray]) -> None: ...
    def flush(self) -> None: ...


def check(
    model: ForeignModel, ops: Ops, expected: Expected, dtype: torch.dtype, device: Staging
) -> float:
    """Seconds of the last step. Raises UnsupportedArchitecture for other logits than expected."""
    spec, hidden, begun = model.spec, [], 0.0
    kv = _memories(spec, ops, dtype)
    for number, step in enumerate(_STEPS):
        device.begin([])
        batch = _batch(spec, ops, expected.ids, kv, step, number)
        device.flush()
        *_, (_, start, stop) = step
        begun = time.perf_counter()
        hidden.append(model.forward(batch).last[start - stop :])
    found = model.logits(torch.cat(hidden)).cpu()
    seconds = time.perf_counter() - begun
    difference = _relative(found, expected.logits.cpu())
    what = (
        f"its logits differ from those of transformers by {difference:.0%} of their deviation when "
        "two texts are in one step and one of them is computed in two"
    )
    rounded = _MOST_OF_EXPERTS if expected.has_experts else _MOST_ROUNDED
    if not difference < _MOST.get(dtype, rounded):  # NaN is not
        raise refusal(model.spec.architecture, what)
    if difference > _MUCH:
        logger.warning(
            "%s: %s. With experts this may be rounding; dtype='float32' shows whether it is.",
            model.spec.architecture,
            what,
        )
    return seconds


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:  # what counts positions may cut a step's tokens
        return math.inf
    deviation = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    return float(((found - expected).norm(dim=1) / deviation).mean())


def _place(model: Any) -> torch.device:
    place: torch.device = next(model.parameters()).device
    return place


def _text(vocab: int, model: Any) -> Tensor:
    """Ids on the model's device, without the padding token's, which some models do not count."""
    # the same text at each start, so that what has passed once passes again
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (sum(_LENGTHS),), generator=generator)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(padding, int):
        ids = torch.where(ids == padding, (ids + 1) % vocab, ids)
    return ids.to(_place(model))


def _batch(
    spec: ForeignDecoder, ops: Ops, text: Tensor, kv: list[Any], step: Sequence[Span], number: int
) -> Batch:
    """A step over some tokens of both texts."""
    device = text.device
    starts = np.cumsum((0, *_LENGTHS))
    ids = torch.cat([text[starts[i] + first : starts[i] + last] for i, first, last in step])
    positions = torch.cat([torch.arange(first, last) for _, first, last in step])
    slots = torch.cat([(i + 1) * _BLOCK + torch.arange(first, last) for i, first, last in step])
    windows = sorted({each.window for each in spec.calls} or {None}, key=lambda w: w or 0)
    of_layers = [*(windows.index(each.window) for each in spec.calls), *(0 for _ in spec.caches)]
    return Batch(
        ids=ids,
        embeds=None,
        positions=positions[None].to(device),
        groups=[*_groups(spec, ops, windows, slots.to(device), step), _states(step, number)],
        kv=kv,
        layer_groups=[*of_layers, *(len(windows) for _ in spec.states)],
        num_tokens=len(ids),
    )


def _states(step: Sequence[Span], number: int) -> StateBatch:
    """Each text has two blocks, which a step reads and writes by turns."""
    reads, writes = [], []
    for text, first, last in step:
        rest = [NO_BLOCK] * (last - first - 1)
        reads += [2 * text + 1 + number % 2, *rest]
        writes += [*rest, 2 * text + 1 + (number + 1) % 2]
    return StateBatch(torch.tensor(reads), torch.tensor(writes))


def _memories(spec: ForeignDecoder, ops: Ops, dtype: torch.dtype) -> list[Any]:
    """Blocks for both texts and one more, of each call or cache."""
    shapes: list[BlockShape] = [
        *(KVShape(_BLOCK, a.kv_heads, a.head_dim) for a in spec.calls),
        *(LatentShape(_BLOCK, c.numbers, 0, c.index_dim) for c in spec.caches),
        *(StateShape(4 * sum(s.sizes)) for s in spec.states),
    ]
    return [ops.allocate_shared_kv(1 + 2 * len(_LENGTHS), [shape], dtype)[0] for shape in shapes]


def _groups(
    spec: ForeignDecoder,
    ops: Ops,
    windows: list[int | None],
    slots: Tensor,
    step: Sequence[Span],
) -> Iterator[LayerBatch]:
    starts = np.cumsum((0, *(last - first for _, first, last in step)), dtype=np.int32)
    table = torch.tensor([[i + 1] for i, *_ in step], dtype=torch.int32, device=slots.device)
    for window in windows:
        make = partial(ops.plan_attention, window=window) if spec.calls else ops.plan_indexed
        plan = make(
            query_start=starts,
            seq_lens=np.array([last for *_, last in step], dtype=np.int32),
            block_table=table,
            block_size=_BLOCK,
        )
        yield GroupBatch(slots, plan)
