"""Feed-forward parts of a decoder that run, dense or with experts: built from specs and weights."""
