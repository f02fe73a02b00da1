"""What a spec costs: parameters, arithmetic and traffic per token. Functions of the spec, the same
for all families.
"""

from __future__ import annotations

from quire.models.formats import Storage
from quire.models.parameters import num_parameters, parameters
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.spec import Block, Decoder, LatentAttention, Mixer, Moe

__all__ = ["active_parameters", "flops_per_token", "num_parameters", "size_in_codes"]


def active_parameters(decoder: Decoder) -> int:
    """The number of weights that one token is multiplied with: only the chosen ones of E experts,
    with the head but without the embedding.
    """
    idle = sum(_idle_expert_weights(block, decoder.dim) for block in decoder.blocks)
    leaves = parameters(decoder)
    looked_up = leaves["embed.weight"].size * (not decoder.tie)
    positions = leaves["positions.weight"].size if decoder.learned_positions else 0
    return num_parameters(decoder) - looked_up - positions - idle


def flops_per_token(decoder: Decoder, context: int = 0) -> int:
    """Multiplications and additions for one new token that sees `context` tokens in its full
    layers.
    """
    return 2 * active_parameters(decoder) + sum(
        2 * _numbers_per_key(mixer) * mixer.memory.num_seen(context)
        for mixer in (block.mixer for block in decoder.blocks)
    )


def size_in_codes(family: Family, decoder: Decoder, storage: Storage) -> tuple[int, int]:
    """How many weights are stored as codes, and their bytes with scales and zero points; those of
    layers alone where the config does not say which.
    """
    stored = [tensor.in_codes(storage) for tensor in tensor_map(family, decoder)]
    coded = [t for t in stored if t.layout is not None and not _is_left_to_files(t, storage)]
    count = sum(leaf.size for tensor in coded for leaf in tensor.leaves)
    return count, sum(t.layout.num_bytes(*t.shape) for t in coded if t.layout is not None)


def _is_left_to_files(tensor: StoredTensor, storage: Storage) -> bool:
    in_layer = all(
        leaf.name.startswith("layers.") and not leaf.name.endswith("router.weight")
        for leaf in tensor.leaves
    )
    return storage.is_decided_by_files and not in_layer


def _numbers_per_key(mixer: Mixer) -> int:
    """What one token is multiplied with for each token that it sees: keys and values, or, in the
    absorbed form, the latent with its rotated key, and once more the latent.
    """
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (2 * mixer.rank + mixer.rotated)
    return 2 * mixer.heads * mixer.head_dim


def _idle_expert_weights(block: Block, dim: int) -> int:
    moe = block.mlp
    if not isinstance(moe, Moe):
        return 0
    inner = moe.width * (1 + moe.gated)
    biases = (inner + dim) * moe.bias
    return (moe.experts - moe.top_k) * ((inner + moe.width) * dim + biases)
