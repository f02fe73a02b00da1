"""From the values of a plan to the recipe of a model."""

from __future__ import annotations

from quire.models.formats.rounding_rules import Kind, RoundingRules, kind_of
from quire.models.parameters import parameters
from quire.models.rules import Family, tensor_map
from quire.models.spec import Decoder
from quire.ops import WeightFormat
from quire.quantization import RECIPES, UNQUANTIZED, Recipe


def recipe_of(quantization: str | None, rules: RoundingRules | None) -> Recipe:
    """The recipe of a plan's `quantization` and `rounding_rules`."""
    if rules is None:
        return UNQUANTIZED if quantization is None else RECIPES[quantization]
    scheme_of = rules.scheme_finder()

    def choose(leaf: str, module: str) -> WeightFormat | None:
        kind = kind_of(leaf)
        return None if kind is None else format_of(scheme_of(kind, module), kind)

    return Recipe(format_of(rules.linear, "linear"), format_of(rules.head, "head"), choose)


def format_of(scheme: str | None, kind: Kind) -> WeightFormat | None:
    """The format of a module of a kind in a scheme."""
    if scheme is None:
        return None
    return RECIPES[scheme].format_of("head" if kind == "head" else "projection")


def for_decoder(recipe: Recipe, family: Family | None, decoder: Decoder) -> Recipe:
    """The recipe with the formats of the decoder's leaves, whose modules the family names; without
    a family they are named by themselves.
    """
    if recipe.choose is None:
        return recipe
    modules = {leaf: leaf.removesuffix(".weight") for leaf in parameters(decoder)}
    stored = () if family is None else tensor_map(family, decoder)
    modules |= {leaf.name: tensor.module for tensor in stored for leaf in tensor.leaves}
    return recipe.for_modules({"head.weight": "lm_head"} | modules)
