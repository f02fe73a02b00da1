"""What a spec costs: parameters, arithmetic and traffic per token. Functions of the spec, the same
for all families.
"""

from __future__ import annotations

from quire.models.parameters import num_parameters, outer_parameters
from quire.models.spec import Block, Decoder, Moe

__all__ = ["active_parameters", "flops_per_token", "num_parameters"]


def active_parameters(decoder: Decoder) -> int:
    """The number of weights that one token is multiplied with: only the chosen ones of E experts,
    with the head but without the embedding.
    """
    idle = sum(_idle_expert_weights(block, decoder.dim) for block in decoder.blocks)
    leaves = outer_parameters(decoder)
    looked_up = leaves["embed.weight"].size * (not decoder.tie)
    positions = leaves["positions.weight"].size if decoder.learned_positions else 0
    return num_parameters(decoder) - looked_up - positions - idle


def flops_per_token(decoder: Decoder, context: int = 0) -> int:
    """Multiplications and additions for one new token that sees `context` tokens in its full
    layers.
    """
    return 2 * active_parameters(decoder) + sum(
        block.mixer.flops(context) for block in decoder.blocks if block.mixer is not None
    )


def _idle_expert_weights(block: Block, dim: int) -> int:
    moe = block.mlp
    if not isinstance(moe, Moe):
        return 0
    inner = moe.width * (1 + moe.gated)
    biases = (inner + dim) * moe.bias
    return (moe.experts - moe.top_k) * ((inner + moe.width) * dim + biases)
