"""What workers have of a model, put together, is the model: each value once, or on all of them."""

from dataclasses import dataclass, replace

import pytest
import torch

from quire.models import memories_of, read_spec
from quire.models.cutting.sharding import LeafPart, own_part, shard
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.parameters import parameters
from quire.models.spec import LatentAttention
from quire.ops import select
from quire.testing import make_checkpoint
from quire.testing.model_shapes import make_config

FAMILIES = ("llama", "qwen2", "gemma2", "starcoder2", "gpt2", "minicpm3")


@dataclass
class Place:
    """A worker of a group that does not run."""

    rank: int
    size: int


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_put_together_are_the_whole(tmp_path, family):
    folder = make_checkpoint(tmp_path, {}, family, dtype="float32")
    spec = read_spec(make_config("tiny", family))
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])

    def load(group):
        options = ModelOptions(group=group)
        model = load_model(
            folder, spec, ops, dtype=torch.float32, max_model_len=64, options=options
        )
        return dict(model.named_parameters())

    whole = load(None)
    parts = [load(Place(rank, 2)) for rank in range(2)]
    attn, mlp = spec.blocks[0].mixer, spec.blocks[0].mlp
    fused = {"up": [1, 1] if mlp.gated else [1]}
    if isinstance(attn, LatentAttention):
        fused |= {"q_b": [1], "absorb": [1], "values": [1]}
    else:
        fused["qkv"] = [attn.heads, attn.kv_heads, attn.kv_heads]
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    for name, tensor in whole.items():
        mine, leaf = [part[name] for part in parts], name.split(".")[-2]
        if leaf in ("o", "down") and name.endswith("weight"):
            assert torch.equal(torch.cat(mine, 1), tensor), name
        elif leaf in fused:
            sizes = fused[leaf]
            unit = len(tensor) // sum(sizes)
            each = [part.split([n * unit // 2 for n in sizes]) for part in mine]
            joined = torch.cat([torch.cat(pair) for pair in zip(*each, strict=True)])
            assert torch.equal(joined, tensor), name
        else:
            assert all(torch.equal(part, tensor) for part in mine), name


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_workers_have_a_head_of_keys_each_where_there_are_fewer(kv_heads):
    spec = read_spec(
        make_config({"num_key_value_heads": kv_heads, "num_attention_heads": 8}, "llama")
    )
    own, whole = shard(spec, 4), parameters(spec)
    assert {block.mixer.kv_heads for block in own.blocks} == {1}
    for part in "kv":
        name = f"layers.0.attn.{part}.weight"
        width = spec.blocks[0].mixer.head_dim
        found = [own_part(whole[name], parameters(own)[name], rank, 4) for rank in range(4)]
        parts = [LeafPart(0, ((head * width, width),), kv_heads) for head in (0, 0, 1, 1)]
        assert found == ([None] * 4 if kv_heads == 1 else parts)
        assert parameters(own)[name].shape[0] == width


@pytest.mark.parametrize("size", [2, 4])
def test_a_part_is_a_decoder_of_its_own(size):
    spec = read_spec(make_config({"num_key_value_heads": 4}, "llama"))
    own, whole = shard(spec, size), parameters(spec)
    for one, other in zip(memories_of([own]), memories_of([spec]), strict=True):
        assert one == replace(other, kv_heads=other.kv_heads // size)
    for leaf in parameters(own).values():
        axis = {"column": 0, "kv": 0, "row": 1}.get(leaf.role)
        found = [own_part(whole[leaf.name], leaf, rank, size) for rank in range(size)]
        if axis is None:
            assert found == [None] * size and leaf == whole[leaf.name]
            continue
        ends = [(start, start + length) for part in found for start, length in part.runs]
        assert {part.axis for part in found} == {axis} and ends[0][0] == 0
        assert all(one[1] == other[0] for one, other in zip(ends, ends[1:], strict=False))
        assert ends[-1][1] == whole[leaf.name].shape[axis]
        assert {end - start for start, end in ends} == {leaf.shape[axis]}
