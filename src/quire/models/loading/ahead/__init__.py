"""Weights that are packed before the loader asks for them: which ones, and where they lie."""
