"""Decoders cut between layers: what each stage has, and what cannot be cut."""

import json
from dataclasses import replace

import pytest

from quire.errors import LoadError
from quire.models import memories_of, read_spec
from quire.models.cutting.stages import cut, memory_places, stages_of
from quire.models.parameters import parameters
from quire.models.spec import Block, Indexer, LatentAttention, Mlp, Norm
from quire.testing.model_shapes import make_config
from tests.models.hostile.models import HOSTILE, write

SIX = {"num_hidden_layers": 6}


@pytest.mark.parametrize("name", ["gpt2", "falcon_h1", "mixtral", "qwen3_next", "opt"])
def test_stages_put_together_are_the_whole(name, tmp_path):
    write(HOSTILE[name], tmp_path)
    whole = read_spec(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    count = len(whole.blocks)
    stages = stages_of(whole, [1] * count)
    pieces = [cut(whole, stage) for stage in stages]
    assert memories_of(pieces) == whole.memories
    places = [place for stage in stages for place in memory_places(whole, stage)]
    assert places == list(range(len(whole.memories)))
    leaves = [parameters(piece) for piece in pieces]
    assert {name: leaf for own in leaves for name, leaf in own.items()} == parameters(whole)
    table = {"embed.weight"} if whole.tie else set()
    assert sum(map(len, leaves)) == len(parameters(whole)) + len(table)
    assert [piece.generates for piece in pieces] == [False] * (count - 1) + [True]
    assert [piece.embeds for piece in pieces] == [True] + [False] * (count - 1)


def sharing(layer, **change):
    """Six layers, of which the last reads what this one remembers, or runs with its weights."""
    spec = read_spec(make_config(SIX, "llama"))
    *others, last = spec.blocks
    changed = replace(last, **change) if change else last
    if not change:
        changed = replace(last, mixer=replace(last.mixer, shares=layer))
    return replace(spec, blocks=(*others, changed))


def test_earlier_layers_are_counted_from_the_first_of_the_stage():
    whole = sharing(4)
    piece = cut(whole, stages_of(whole, (3, 3))[1])
    assert piece.blocks[-1].mixer.shares == 1
    assert memory_places(whole, piece.stage) == range(3, 5)
    whole = sharing(4, repeats=4)
    assert cut(whole, stages_of(whole, (2, 4))[1]).blocks[-1].repeats == 2


@pytest.mark.parametrize(
    ("whole", "why"),
    [
        (sharing(2), "layer 5 reads the keys and values of layer 2"),
        (sharing(1, repeats=1), "layer 5 runs with the weights of layer 1"),
    ],
)
def test_what_needs_an_earlier_stage_is_refused(whole, why):
    first, last = stages_of(whole, (3, 3))
    with pytest.raises(LoadError, match=why):
        cut(whole, last)
    assert len(cut(whole, first).blocks) == 3


@pytest.mark.parametrize("sizes", [(6, 1), (3,), (7, -1), (0, 6)])
def test_layers_of_stages_are_those_of_the_model(sizes):
    with pytest.raises(LoadError, match="are not the 6 layers"):
        stages_of(read_spec(make_config(SIX, "llama")), sizes)


def test_layers_that_take_a_choice_stay_with_the_layer_that_makes_it():
    indexer = Indexer(2, 8, 4, Norm("layer", bias=True))
    own = LatentAttention(2, 8, 8, 8, 8, 0.3, Norm(), q_rank=8, indexer=indexer)
    taking = replace(own, indexer=replace(indexer, is_shared=True))
    blocks = tuple(Block(mixer, Mlp(16), Norm()) for mixer in (own, taking, own, taking))
    whole = replace(sharing(4), blocks=blocks)
    assert len(cut(whole, stages_of(whole, (2, 2))[1]).blocks) == 2
    with pytest.raises(LoadError, match="layer 1 attends to tokens that a layer of an earlier"):
        cut(whole, stages_of(whole, (1, 3))[1])
