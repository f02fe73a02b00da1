"""Tensors as bytes and as base64, as clients of a server send and receive them."""

from __future__ import annotations

import base64
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class NumberFormat:
    """A format of the numbers of an embedding. `bits`: the type that its bytes are read as."""

    torch_dtype: torch.dtype
    bits: str

    @property
    def nbytes(self) -> int:
        """Bytes of a number."""
        return self.torch_dtype.itemsize


EMBED_DTYPES = {
    "float32": NumberFormat(torch.float32, "i4"),
    "float16": NumberFormat(torch.float16, "i2"),
    "bfloat16": NumberFormat(torch.bfloat16, "i2"),
    "fp8_e4m3": NumberFormat(torch.float8_e4m3fn, "u1"),
    "fp8_e5m2": NumberFormat(torch.float8_e5m2, "u1"),
}
ENDIANNESS = ("native", "big", "little")


@dataclass
class MetadataItem:
    """The place of one tensor in the bytes of a reply."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


def build_metadata_items(
    embed_dtype: str, endianness: str, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """The places of tensors of one shape, one after the other."""
    size = math.prod(shape) * EMBED_DTYPES[embed_dtype].nbytes
    return [
        MetadataItem(index, embed_dtype, endianness, index * size, (index + 1) * size, shape)
        for index in range(n_request)
    ]


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[torch.Tensor]:
    """The tensors of a reply of `encoding_format: "bytes"`."""
    return [
        binary2tensor(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness)
        for item in items
    ]


def binary2tensor(
    binary: bytes, shape: tuple[int, ...], embed_dtype: str, endianness: str
) -> torch.Tensor:
    """The tensor of a vector's bytes. Raises KeyError for a format or a byte order that does not
    exist, ValueError for a shape that the bytes do not fill.
    """
    found = EMBED_DTYPES[embed_dtype]
    order = {"native": "=", "big": ">", "little": "<"}[endianness]
    # as whole numbers of the same size: numpy has neither bfloat16 nor 8-bit floats
    bits = np.frombuffer(binary, order + found.bits).reshape(shape)
    return torch.from_numpy(bits.astype("=" + found.bits)).view(found.torch_dtype)


def tensor2binary(tensor: torch.Tensor, embed_dtype: str, endianness: str) -> bytes:
    """The numbers of a tensor, in order, as bytes; `binary2tensor` reads them."""
    found = EMBED_DTYPES[embed_dtype]
    bits = tensor.to(found.torch_dtype).contiguous().view(torch.uint8).numpy().tobytes()
    if endianness in ("native", sys.byteorder):
        return bits
    return np.frombuffer(bits, found.bits).byteswap().tobytes()


def tensor2base64(x: torch.Tensor) -> str:
    """A tensor as torch saves it, in base64: the form of `prompt_embeds` in a request."""
    file = io.BytesIO()
    torch.save(x, file)
    return base64.b64encode(file.getbuffer()).decode("ascii")
