"""Weights that are rounded: while a model is loaded, and into a checkpoint of their own."""
