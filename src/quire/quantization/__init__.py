"""Quantisation of weights while a model is loaded: which weight is stored how, and why."""

from quire.quantization.recipe import RECIPES, UNQUANTIZED, Recipe, Role

__all__ = ["RECIPES", "UNQUANTIZED", "Recipe", "Role"]
