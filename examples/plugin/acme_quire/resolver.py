"""A resolver of LoRA adapters: "acme/NAME" is the folder NAME of the one in ACME_ADAPTERS."""

import os
from pathlib import Path

from quire.lora.request import LoRARequest
from quire.lora.resolver import LoRAResolver, is_plain_name

PREFIX = "acme/"


class AcmeAdapters(LoRAResolver):
    """Knows names that begin with "acme/"."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        name = lora_name.removeprefix(PREFIX)
        folder = os.environ.get("ACME_ADAPTERS")
        if folder is None or name == lora_name or not is_plain_name(name):
            return None
        path = Path(folder, name)
        return LoRARequest(lora_name, 1, str(path)) if path.is_dir() else None


RESOLVER = AcmeAdapters()
