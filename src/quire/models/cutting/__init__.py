"""Cuts of a model: over workers that share its layers, or between layers."""
