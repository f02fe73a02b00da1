"""Decides which request gets how many tokens in which blocks; pure: integers in, integers out."""
