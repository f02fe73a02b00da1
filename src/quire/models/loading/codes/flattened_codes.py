"""Codes of bitsandbytes: of four bits, with a scale for each block of the flattened weight."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError
from quire.models.config_reader import unsupported
from quire.models.formats.storage import (
    FLATTENED,
    SCALES_WITH_ONE_SCALE,
    SMALLEST_GROUP,
    CodeLayout,
)
from quire.models.formats.storage import quant_state as name_of_state

Parts = Mapping[str, Tensor]
"""A module's tensors by what follows its name."""

_MOST_BYTES = 10_000
"""Most bytes of a state."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of one weight's blocks. `dtype` is that of the weight before it was rounded."""

    quant_type: str
    blocksize: int
    shape: list[int]
    dtype: str
    nested_blocksize: int | None = None
    nested_dtype: str | None = None
    nested_offset: float = 0.0


def check_state(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> None:
    """Raise UnsupportedConfigValue or CorruptCheckpoint unless the blocks are those of the layout,
    and LoadError where products cannot read them.
    """
    name = name_of_state(layout)
    state = msgspec.structs.asdict(_state(layout, parts, f"{module}.{name}"))
    outputs = 2 * parts["weight"].numel() // inputs
    expected = {
        "quant_type": FLATTENED[layout.packing],
        "blocksize": layout.group,
        "shape": [outputs, inputs],
        "nested_blocksize": SCALES_WITH_ONE_SCALE if layout.is_nested else None,
    }
    for key, value in expected.items():
        if state[key] != value:
            raise unsupported(key, state[key], str(value), f"{module}.{name}")
    if not bool(parts["weight.quant_map"].isfinite().all()):
        raise CorruptCheckpoint(f"{module}.weight.quant_map has a number that is not finite.")
    if layout.group_in(inputs) % SMALLEST_GROUP:
        raise LoadError(
            f"{module} has {inputs} inputs, and a scale for every {layout.group} weights, row "
            f"after row: the inputs must be a multiple of {SMALLEST_GROUP}."
        )


def unpack_flattened(layout: CodeLayout, parts: Parts, inputs: int) -> tuple[Tensor, Tensor, None]:
    """Bytes have the even input in their upper half. Where blocks run over the ends of rows, each
    has its scale for every part of it that lies in a row.
    """
    flat = parts["weight"].flatten()
    codes = ((flat << 4) | (flat >> 4)).view(-1, inputs // 2)
    scales = _scales(layout, parts)
    group, block = layout.group_in(inputs), layout.group
    assert block is not None, "all packings of this kind have blocks"
    if group != block:
        first = torch.arange(0, 2 * len(flat), group)
        scales = scales[first // block]
    return codes, scales.view(len(codes), -1), None


def _scales(layout: CodeLayout, parts: Parts) -> Tensor:
    """The scales of all blocks, fp32."""
    stored = parts["weight.absmax"]
    if not layout.is_nested:
        return stored.float()
    numbers = parts["weight.nested_quant_map"].float()[stored.long()]
    of_scales = parts["weight.nested_absmax"].float()
    wide = of_scales.repeat_interleave(SCALES_WITH_ONE_SCALE)[: len(stored)]
    return numbers * wide + _state(layout, parts).nested_offset


def _state(layout: CodeLayout, parts: Parts, name: str = "") -> _State:
    """Raises CorruptCheckpoint, which names the tensor."""
    stored = parts[name_of_state(layout)]
    try:
        if len(stored) > _MOST_BYTES:
            raise msgspec.DecodeError(f"it has {len(stored)} bytes")
        return msgspec.json.decode(bytes(stored.tolist()), type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{name} describes no blocks: {error}.") from None
