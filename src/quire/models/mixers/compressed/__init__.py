"""Attention to the last tokens and to compressed entries of all before."""
