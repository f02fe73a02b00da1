"""Token mixers, as parts of a decoder that run: built from specs and weights."""
