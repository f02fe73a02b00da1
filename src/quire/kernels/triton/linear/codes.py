"""Takes weights that a checkpoint stores as codes: as they are where the kernel multiplies with
them, else widened, which start-up says once for each reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from quire.kernels.triton.linear import triton_linear
from quire.kernels.triton.linear.triton_coded import (
    TritonCoded,
    obstacle,
    pack_coded,
    pack_coded_experts,
)
from quire.kernels.triton.linear.triton_linear import TritonLinear
from quire.ops.formats.coded import CodedWeight

logger = logging.getLogger(__name__)

TritonProduct = TritonLinear | TritonCoded


def pack_codes(
    weight: CodedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_fixed: bool,
) -> TritonProduct:
    """A weight in codes, widened to `dtype` where there is no product with it on `device`."""
    why = obstacle(weight, device)
    if not why:
        return pack_coded(weight, bias, is_fixed=is_fixed)
    _say_widened(dtype, why)
    return triton_linear.pack(weight.widened().to(dtype), bias, None, is_fixed=is_fixed)


def pack_codes_of_experts(
    weights: Sequence[CodedWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_fixed: bool,
) -> TritonProduct:
    """Pack the codes of experts, bias [E, out]."""
    why = next(filter(None, (obstacle(weight, device) for weight in weights)), "")
    packed = None if why else pack_coded_experts(weights, bias, is_fixed=is_fixed)
    if packed is not None:
        return packed
    _say_widened(dtype, why or "experts whose inputs are reordered, or that differ in their codes")
    wide = torch.stack([weight.widened().to(dtype) for weight in weights])
    return triton_linear.pack(wide, bias, None, is_fixed=is_fixed)


# said once, and not for each layer
@cache
def _say_widened(dtype: torch.dtype, why: str) -> None:
    logger.warning(
        "Quantised weights of the checkpoint are widened to %s, and take the memory of those of an "
        "unquantised model, because no kernel for GPUs multiplies with %s; activations are not "
        "rounded.",
        *(str(dtype).removeprefix("torch."), why),
    )
