"""Text in and out of token ids: tokenizers, chat templates, incremental detokenisation.

Layer 1 of the package: neither torch nor transformers is imported here, so that a process which
only serves stays small.
"""
