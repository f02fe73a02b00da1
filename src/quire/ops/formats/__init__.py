"""Formats in which weights are stored and multiplied, one file each."""
