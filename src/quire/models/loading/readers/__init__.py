"""Readers of the files that weights are stored in, one for each way of storing them."""
