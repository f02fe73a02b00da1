"""Structured output: constraints on outputs, as masks over the vocabulary."""
