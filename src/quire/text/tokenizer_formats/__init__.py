"""Readers of tokenizer files other than tokenizer.json: each makes the library's object."""
