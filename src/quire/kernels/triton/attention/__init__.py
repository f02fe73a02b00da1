"""Attention over paged KV memory, and what is written to it."""
