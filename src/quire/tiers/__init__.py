"""Stores of blocks of K/V outside of the pool: host memory, and a folder."""
