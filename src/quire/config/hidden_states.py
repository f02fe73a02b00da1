"""`HiddenStatesPlan`: which hidden states of prompts are written to files, and where."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence

import msgspec


class HiddenStatesPlan(msgspec.Struct, frozen=True):
    """The states that enter these `layers` (ascending; the number of layers: what the last one
    gives, before the final norm) go to a file in `folder` for each prompt.
    """

    layers: tuple[int, ...]
    folder: str

    def path(self, handle: int, prompt_token_ids: Sequence[int]) -> str:
        """The file of a request. Its name follows from the prompt, too, so that another engine with
        this folder does not overwrite the states of other prompts.
        """
        digest = hashlib.blake2b(array("q", prompt_token_ids).tobytes(), digest_size=12)
        return os.path.join(self.folder, f"{handle:x}-{digest.hexdigest()}.safetensors")
