"""Choice of a folder's tokenizer file. Nothing of the tokenizers library is imported here."""

from __future__ import annotations

import re
from pathlib import Path

from quire.text.model_files import MOST_VOCABULARY_BYTES, has_file

MODES = ("auto", "hf", "mistral")
TEKKEN = "tekken.json"
SENTENCEPIECE = "tokenizer.model"
_OF_HUB = ("tokenizer.json", "vocab.json")


def found_mode(folder: Path) -> str:
    """tokenizer_mode="auto": "mistral" for a folder with Mistral's own files alone, else "hf"."""
    if any(has_file(folder / name, MOST_VOCABULARY_BYTES) for name in _OF_HUB):
        return "hf"
    return "mistral" if mistral_file(folder) is not None else "hf"


def mistral_file(folder: Path) -> Path | None:
    """tekken.json, or the SentencePiece model with the highest version in its name."""
    if has_file(folder / TEKKEN, MOST_VOCABULARY_BYTES):
        return folder / TEKKEN
    versions = folder.glob(f"{SENTENCEPIECE}.v*")
    return max(versions, key=_version, default=None)


def _version(file: Path) -> tuple[list[int], str]:
    """The numbers of a name such as tokenizer.model.v7m1: v11 comes after v3."""
    return [int(digits) for digits in re.findall(r"\d+", file.suffix)], file.name


def tiktoken_file(folder: Path) -> Path | None:
    """The file of a tiktoken vocabulary that says so by its name."""
    found = [*folder.glob("tiktoken.model"), *sorted(folder.glob("*.tiktoken"))]
    return found[0] if found else None
