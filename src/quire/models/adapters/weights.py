"""The weights of one LoRA adapter, by the leaves of the model that they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """Addend to a leaf's weight [out, in] (of `embed`, as of `head`, [V, C]): b @ a, with
    the scaling in `b`.

    a [r, in], b [out, r], both in the adapter's dtype, on the CPU, contiguous; columns and rows in
    the order of the leaf's (`quire.models.parameters`), not in that of the checkpoint.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter that has been read and checked against its model.

    `products`: by the canonical name of the leaf without `.weight` (`layers.3.attn.q`, `embed`,
    `head`, `layers.0.mlp.experts.5.gate`). `head`: leaves of the pooling head that it replaces, by
    canonical name (`pooler.classifier.weight`), or {}. `digest`: SHA-256 of everything that
    determines its results, so that equal contents have equal numbers.
    """

    products: Mapping[str, LowRank]
    head: Mapping[str, Tensor]
    digest: bytes

    @property
    def number(self) -> int:
        """The adapter's number in requests and block keys: 1 .. 2^63 - 1, by its contents."""
        return (int.from_bytes(self.digest[:8], "little") >> 1) | 1

    @property
    def nbytes(self) -> int:
        pairs = sum(low.a.nbytes + low.b.nbytes for low in self.products.values())
        return pairs + sum(tensor.nbytes for tensor in self.head.values())
