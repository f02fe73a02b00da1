"""Loss of rounded weights: the embedded model on library files kept out of its training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire import EngineArgs, embedded
from quire.config.args.option import options_of
from quire.config.resolve.dtype import STORED_NAMES
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats.rounding_rules import BITS_PER_WEIGHT, ONLINE, OTHER_NAMES
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.ops import WeightFormat, select
from quire.quantization import RECIPES, UNQUANTIZED, Recipe
from tests.quantization.held_out import held_out_windows, logits_of, mean_loss

HELD_OUT = ("calendar.py", "csv.py", "fractions.py", "heapq.py", "shlex.py", "textwrap.py")


def model_with(recipe, providers=()):
    folder = embedded.path()
    spec = read_spec(read_config(folder))
    ops = select(device="cpu", dtype=torch.bfloat16, providers=providers)
    return load_model(folder, spec, ops, dtype=torch.bfloat16, options=ModelOptions(recipe)), ops


def loss_of(recipe, windows, providers=()):
    """Nats per token."""
    return mean_loss(*model_with(recipe, providers), windows)


@pytest.fixture(scope="module")
def baseline():
    return loss_of(UNQUANTIZED, list(held_out_windows(HELD_OUT)))


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.005), ("int4", 0.03), ("fp8", 0.005)])
def test_a_recipe_costs_little_loss(name, limit, baseline):
    providers = ("torch",) if name == "fp8" else ()
    loss = loss_of(RECIPES[name], list(held_out_windows(HELD_OUT)), providers)
    assert abs(loss / baseline - 1) < limit


def test_the_measure_sees_bad_rounding(baseline):
    coarse = Recipe(projections=WeightFormat("int4", group=128), head=None)
    windows = list(held_out_windows(HELD_OUT))
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
    assert {*options_of(EngineArgs)["quantization"].choices} == {
        *(*RECIPES, *STORED_NAMES, *OTHER_NAMES, ONLINE)
    }
    assert set(OTHER_NAMES.values()) <= set(RECIPES)
    assert set(RECIPES) == set(BITS_PER_WEIGHT)
    for name, recipe in RECIPES.items():
        bits = {"fp8": 8, "int8": 8, "int4": 4 + 16 / (recipe.projections.group or 1)}
        assert BITS_PER_WEIGHT[name] == bits[recipe.projections.name]


def test_only_routers_tables_and_norms_keep_their_values():
    for recipe in RECIPES.values():
        assert recipe.format_of("router") is None
        assert recipe.format_of("projection") is not None and recipe.format_of("head") is not None
    assert UNQUANTIZED.format_of("projection") is None
