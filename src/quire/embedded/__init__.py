"""The checkpoint that ships with the package: what `model=None` means, usable without a download.

It is a small Llama-architecture model of Python source in the layout of a Hugging Face folder
(config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json), so
everything that loads such a folder loads it. docs/embedded_model.md says how it was made.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["draft_head", "path"]


def path() -> Path:
    """Return the folder of the embedded checkpoint; read it, never write to it.

    Raises FileNotFoundError if the package lies in an archive or was installed without its data:
    weights are mapped into memory, so they must be real files.
    """
    folder = Path(str(resources.files(__name__))) / "checkpoint"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"The embedded model is not in {folder}. Install quire, unpacked, from a wheel or from "
            f"its source tree."
        )
    return folder


def draft_head() -> Path:
    """Return the folder of the EAGLE-3 network that guesses the embedded model's tokens:
    `LLM(speculative_config={"method": "eagle3", "model": draft_head(), ...})`. Read it, never write
    to it.

    Raises FileNotFoundError as `path` does.
    """
    return path().parent / "draft_head"
