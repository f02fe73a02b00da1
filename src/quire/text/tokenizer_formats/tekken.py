"""Mistral's `tekken.json`: a pattern, tokens of bytes with ranks, special tokens before them."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import msgspec
from tokenizers import AddedToken

from quire.errors import LoadError
from quire.text.model_files import MOST_VOCABULARY_BYTES, read_text
from quire.text.tokenizer_formats.byte_pairs import build_byte_pairs, check_ranks
from quire.text.tokenizer_formats.foreign import ForeignTokenizer

_SPECIAL_BEFORE_V11 = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files that do not list them."""
_OLD_VERSIONS = ("v1", "v2", "v3", "v7")
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MOST_TOKENS = 1 << 22


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str = "v3"


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def read_tekken(path: Path) -> ForeignTokenizer:
    """Read a tekken.json. Raises LoadError."""
    text = read_text(path, MOST_VOCABULARY_BYTES)
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LoadError(f"{path} is not a tekken file: {error}.") from error
    config = file.config
    first_id, size = config.default_num_special_tokens, config.default_vocab_size
    if not 0 <= first_id < size <= _MOST_TOKENS:
        raise LoadError(f"{path} has {first_id} special tokens of {size}, which cannot be.")
    special = _special_tokens(path, file)
    # published files list more tokens than the model has rows for
    ranks = _ranks(path, file.vocab[: size - first_id])
    library = build_byte_pairs(
        ranks,
        {i: AddedToken(text, special=True, normalized=False) for i, text in special.items()},
        first_id=first_id,
        pattern=config.pattern,
        place=str(path),
    )
    known = set(special.values())
    roles = {role: text for role, text in _ROLES.items() if text in known}
    return ForeignTokenizer(library, roles, adds_bos=True)


def _special_tokens(path: Path, file: _File) -> dict[int, str]:
    """Id -> text; ids that the file does not name get the text of Mistral's library."""
    count = file.config.default_num_special_tokens
    if file.special_tokens is not None:
        named = {token.rank: token.token_str for token in file.special_tokens}
    elif file.config.version in _OLD_VERSIONS:
        named = dict(enumerate(_SPECIAL_BEFORE_V11))
    else:
        raise LoadError(f"{path} lists no special_tokens, which version v11 and later need.")
    special = {index: f"<SPECIAL_{index}>" for index in range(count)} | named
    if len(special) > count or len(set(special.values())) < len(special):
        raise LoadError(f"{path} has special tokens with equal texts, or ids beyond {count - 1}.")
    return special


def _ranks(path: Path, vocab: list[_Token]) -> dict[bytes, int]:
    try:
        ranks = {base64.b64decode(t.token_bytes, validate=True): t.rank for t in vocab}
    except (binascii.Error, ValueError) as error:
        raise LoadError(f"{path} has a token that is not base64: {error}.") from error
    check_ranks(ranks, len(vocab), str(path))
    return ranks
