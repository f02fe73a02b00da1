"""What rounding the weights costs: loss of the embedded model on library files that were kept out
of its training.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire import EngineArgs, embedded
from quire.config.args.option import options_of
from quire.config.resolve.dtype import BITS_PER_WEIGHT, STORED_NAMES
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops import Batch, GroupBatch, WeightFormat, select
from quire.quantization import RECIPES, UNQUANTIZED, Recipe
from quire.text.tokenizer import Tokenizer

HELD_OUT = ("calendar.py", "csv.py", "fractions.py", "heapq.py", "shlex.py", "textwrap.py")
WINDOW = 768


def model_with(recipe, providers=()):
    folder = embedded.path()
    spec = read_spec(read_config(folder))
    ops = select(device="cpu", dtype=torch.bfloat16, providers=providers)
    return load_model(folder, spec, ops, dtype=torch.bfloat16, recipe=recipe), ops


def held_out_windows(names=HELD_OUT, window=WINDOW, step=None):
    """The first tokens of each file, or every `step`-th window of it."""
    tokenizer = Tokenizer.from_folder(embedded.path())
    for name in names:
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer.encode(text))
        for start in range(0, len(ids) - window + 1, step or len(ids)):
            yield ids[start : start + window]


def logits_of(model, ops, ids):
    """All logits of one prompt, in one step."""
    spec, count = model.spec, len(ids)
    blocks = -(-count // 16)
    kv = [
        ops.allocate_kv(blocks, 16, memory.kv_heads, memory.head_dim, torch.bfloat16)
        for memory in (block.mixer.memory for block in spec.blocks)
    ]
    plan = ops.plan_attention(
        query_start=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        block_size=16,
        window=None,
    )
    positions = torch.arange(count)
    groups = [GroupBatch(positions, plan)]
    hidden = model.forward(Batch(ids, None, positions[None], groups, kv, [0] * len(kv), count))
    return model.logits(hidden.last)


def loss_of(recipe, windows, providers=()):
    """Nats per token."""
    model, ops = model_with(recipe, providers)
    losses = [F.cross_entropy(logits_of(model, ops, ids)[:-1], ids[1:]).item() for ids in windows]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def baseline():
    return loss_of(UNQUANTIZED, list(held_out_windows()))


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.005), ("int4", 0.03), ("fp8", 0.005)])
def test_a_recipe_costs_little_loss(name, limit, baseline):
    providers = ("torch",) if name == "fp8" else ()
    loss = loss_of(RECIPES[name], list(held_out_windows()), providers)
    assert abs(loss / baseline - 1) < limit


def test_the_measure_sees_bad_rounding(baseline):
    coarse = Recipe(projections=WeightFormat("int4", group=128), head=None)
    windows = list(held_out_windows())
    model, ops = model_with(UNQUANTIZED)
    assert abs(loss_of(coarse, windows) / baseline - 1) > 1e-4
    shifted = [F.cross_entropy(logits_of(model, ops, w)[:-2], w[2:]).item() for w in windows]
    assert sum(shifted) / len(shifted) > 1.03 * baseline


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"fp8"}))  # which is for GPUs
def test_plain_torch_and_native_code_agree(name):
    (ids,) = held_out_windows(("csv.py",), 48)
    native, plain = (
        logits_of(*model_with(RECIPES[name], providers), ids) for providers in ((), ("torch",))
    )
    assert (native - plain).norm() < 0.03 * plain.norm()
    assert (native.argmax(-1) == plain.argmax(-1)).float().mean() > 0.9


def test_every_name_has_a_recipe_and_the_size_that_memory_is_planned_with():
    assert {*options_of(EngineArgs)["quantization"].choices} == {*RECIPES, *STORED_NAMES}
    assert set(RECIPES) == set(BITS_PER_WEIGHT)
    for name, recipe in RECIPES.items():
        bits = {"fp8": 8, "int8": 8, "int4": 4 + 16 / (recipe.projections.group or 1)}
        assert BITS_PER_WEIGHT[name] == bits[recipe.projections.name]


def test_only_routers_tables_and_norms_keep_their_values():
    for recipe in RECIPES.values():
        assert recipe.format_of("router") is None
        assert recipe.format_of("projection") is not None and recipe.format_of("head") is not None
    assert UNQUANTIZED.format_of("projection") is None
