"""A worker's side of K/V outside of the pool."""
