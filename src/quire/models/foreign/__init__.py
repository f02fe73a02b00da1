"""Models that no family describes: transformers' own modules, with Quire's attention and KV cache.

`spec.py` says what such a model is, `dry_run.py` finds it out, `model.py` runs it.
"""
