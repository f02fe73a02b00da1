"""Prompts with pictures: loaded, and put among the tokens."""
