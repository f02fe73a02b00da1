"""Structured output: what an output must look like, turned into masks over the vocabulary."""
