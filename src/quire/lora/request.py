"""`LoRARequest`: which adapter a request is for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from quire.environment import expanded
from quire.errors import InvalidParameter, InvalidType
from quire.params import checks

ADAPTER_FAILED = "the LoRA adapter"
"""The beginning of every error of a request that its adapter caused."""

ADAPTERS_ARE_OFF = "LoRA is not enabled: start the engine with enable_lora (--enable-lora)."


class LoRARequest(msgspec.Struct, omit_defaults=True):
    """A LoRA adapter: a name for it, an id, and the folder that PEFT wrote it into.

    The folder decides: requests with the same one share an adapter whatever they call it, an id
    may be used for several, and a folder with new contents is a new adapter. Equal by name, as
    elsewhere. `load_inplace` asks `add_lora` and the server to read the folder again where the name
    is known already. `is_3d_lora_weight` changes nothing: names of tensors say how experts are
    stored. `base_model_name` is what `/v1/models` says that it was made of.
    Raises InvalidParameter or InvalidType, both ValueErrors.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        checks.text("lora_name", self.lora_name)
        allowed = "it is an int of 1 or more, and of 63 bits at most"
        self.lora_int_id = checks.integer("lora_int_id", self.lora_int_id, 1, 2**63 - 1, allowed)
        if isinstance(self.lora_path, os.PathLike):
            self.lora_path = os.fspath(self.lora_path)
        checks.text("lora_path", self.lora_path)
        if not self.lora_name:
            raise InvalidParameter("lora_name", self.lora_name, "a name has a character")
        if not self.lora_path or "\0" in self.lora_path:
            raise InvalidParameter("lora_path", self.lora_path, "it names the adapter's folder")

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path

    @property
    def folder(self) -> Path:
        """`lora_path` with `~` expanded, absolute. The name of a repository on the hub (owner/name)
        stays as it is, where there is no such folder.
        """
        folder = expanded(self.lora_path)
        # a folder of that name comes before the hub
        if _REPOSITORY.fullmatch(self.lora_path) and not folder.exists():
            return folder
        return folder.absolute()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


_REPOSITORY = re.compile(r"\w[\w.\-]*/\w[\w.\-]*")
GivenAdapters: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts of a call, or one or None for each."""


def check_lora_request(given: object) -> LoRARequest:
    """`given`, if it is one. Raises InvalidType."""
    if not isinstance(given, LoRARequest):
        raise InvalidType("lora_request", given, "it is a LoRARequest")
    return given
