"""Names of types as the headers of files have them."""

from __future__ import annotations

import torch

DTYPE_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.bool: "BOOL",
}  # fmt: skip
"""Names of types of numbers in safetensors files, by which layouts of codes ask for them."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in headers of files; that of torch where they have none."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
