"""tiktoken files: a line for each token, its bytes in base64 and its rank.

The pattern that cuts texts is not in the file but in the code of the model's repository, which is
never run; it is known here for the models of `_PATTERNS`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken

from quire.errors import LoadError
from quire.text.model_files import MOST_VOCABULARY_BYTES, read_text
from quire.text.tokenizer_formats.byte_pairs import build_byte_pairs, check_ranks
from quire.text.tokenizer_formats.foreign import ForeignTokenizer

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PATTERNS = {
    "llama": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}",
    "kimi_k2": (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}"
    ),
}
"""Patterns that cut texts, by model_type."""


def is_tiktoken(path: Path) -> bool:
    """Whether the file is one: SentencePiece files have the same name, and are not text."""
    with path.open("rb") as stream:
        # bounded: a file of the other kind need not have a line end
        first = stream.readline(4096).split()
    return len(first) == 2 and first[1].isdigit()


def read_tiktoken(
    path: Path, model_type: str, declared: Mapping[int, AddedToken]
) -> ForeignTokenizer:
    """Read the file of a model; `declared`: its special and added tokens by id. Raises LoadError,
    also for a model whose pattern is not known.
    """
    if model_type not in _PATTERNS:
        raise LoadError(
            f"{path} is a tiktoken file, and the pattern that belongs to it is only in code of the "
            f"repository (model_type {model_type!r}). Convert it once with transformers to a "
            "tokenizer.json."
        )
    ranks = _ranks(path)
    # ids of the file are its ranks, from 0 on
    clash = [index for index in declared if index < len(ranks)]
    if clash:
        raise LoadError(f"{path}: the added token {clash[0]} has the id of one of the file.")
    library = build_byte_pairs(
        ranks, declared, first_id=0, pattern=_PATTERNS[model_type], place=str(path)
    )
    return ForeignTokenizer(library)


def _ranks(path: Path) -> dict[bytes, int]:
    lines = read_text(path, MOST_VOCABULARY_BYTES).split("\n")
    try:
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise LoadError(f"{path} is not a tiktoken file: {error}.") from error
    check_ranks(ranks, len(pairs), str(path))
    return ranks
