"""Medusa heads as their config.json has them (Cai et al. 2024). Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.spec import Decoder

_OF_TRAINING = ("base_model_name_or_path", "max_paths", "topk", "max_seq_len", "version")


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """`heads` heads of `blocks` residual blocks over `vocab` of the target's ids. `has_one_head`:
    they share one product with the vocabulary. `bias`: of the blocks.
    """

    heads: int
    blocks: int
    vocab: int
    has_one_head: bool = False
    bias: bool = False

    def num_parameters(self, dim: int) -> int:
        """Number of values of the weights, for hidden states of `dim` numbers."""
        products = 1 if self.has_one_head else self.heads
        return self.heads * self.blocks * dim * (dim + self.bias) + products * self.vocab * dim


def read_medusa(config: Mapping[str, Any], target: Decoder) -> MedusaSpec:
    """The heads of a config.json. Raises LoadError for unknown ones, or a wrong target."""
    c = ConfigReader(config)
    c.rename(num_heads="medusa_num_heads", num_hidden_layers="medusa_num_layers")
    width = c.integer("hidden_size", target.dim)
    if width != target.dim:
        raise unsupported("hidden_size", width, f"{target.dim}, the target's")
    vocab = c.integer("vocab_size", target.vocab)
    if vocab != target.vocab:
        raise unsupported("vocab_size", vocab, f"{target.vocab}, the target's")
    c.only("logit_scale", 1.0)
    c.ignore("model_type", *_OF_TRAINING)
    spec = MedusaSpec(
        heads=c.integer("num_heads", maximum=128),
        blocks=c.integer("num_hidden_layers", maximum=64),
        vocab=c.integer("truncated_vocab_size", vocab, maximum=vocab),
        has_one_head=c.flag("original_lm_head", False),
        bias=c.flag("medusa_fc_bias", False),
    )
    c.finish()
    return spec
