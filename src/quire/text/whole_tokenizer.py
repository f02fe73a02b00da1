"""The tokenizer of a folder as transformers makes it, for programs that ask Quire's for more than
engines need: padding, tensors, offsets, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARED = ("chat_template", "model_max_length", "pad_token", "padding_side", "truncation_side")
"""Attributes that programs set; both have the same values."""

CALL_PARAMETERS = frozenset({
    "text_pair", "padding", "padding_side", "pad_to_multiple_of", "stride", "is_split_into_words",
    "return_tensors", "return_token_type_ids", "return_attention_mask", "return_length",
    "return_overflowing_tokens", "return_special_tokens_mask", "return_offsets_mapping", "verbose",
})  # fmt: skip
"""Arguments that calling it takes and calling Quire's does not."""


class WholeTokenizer:
    """Loads it with the first use: transformers takes seconds to import."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._found: Any = None

    def get(self, shared: Mapping[str, Any]) -> Any:
        """The tokenizer, with these values of the attributes in `SHARED`.

        Raises ImportError without transformers, OSError or ValueError for a folder whose tokenizer
        it does not know.
        """
        if self._found is None:
            from transformers import AutoTokenizer

            self._found = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        for name, value in shared.items():
            if getattr(self._found, name, None) != value:
                setattr(self._found, name, value)
        return self._found
