"""Bounds that follow from the parts of a tokenizer: how much of a text one token can cover,
and whether an expression could take time without bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from quire.text.token_pieces import BYTE_OF_LETTER, byte_level_bytes

_SHRINKING = 4
"""A normal form makes one byte of at most four: U+1D400 becomes A, U+212A becomes K."""
_NORMALIZERS = {
    **dict.fromkeys(("ByteLevel", "Prepend"), 1),
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"), _SHRINKING),
}
"""Normalizer -> bytes of a text per byte of its result. Others may leave out whole texts."""
_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts")
"""Pre-tokenizers that drop nothing, unless their behavior is "Removed"."""
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]", re.S)
_GROUP_START = re.compile(r"\(\?[^:()]*:")
_REPEATED_CHOICE = re.compile(r"[*+?}|][^()]*\)(?:[*+]|\{\d*,)")


def longest_token_bytes(library: LibraryTokenizer) -> int | None:
    """The most bytes of a text that one token can stand for; None where there is no such bound,
    because something is left out of texts or unknown characters are merged.
    """
    shrinking = 1
    for part in _parts(library.normalizer, "normalizers"):
        factor = 1 if _is_growing(part) else _NORMALIZERS.get(part["type"])
        if factor is None:
            return None
        shrinking = max(shrinking, factor)
    splits = list(_parts(library.pre_tokenizer, "pretokenizers"))
    drops = any(
        part["type"] not in _PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in splits
    )
    added = library.get_added_tokens_decoder().values()
    # such a token takes all blanks beside it with it
    if drops or any(token.lstrip or token.rstrip for token in added):
        return None
    splits += _parts(library.normalizer, "normalizers")
    is_byte_level = any(part["type"] == "ByteLevel" for part in splits)
    if not _covers_everything(library, is_byte_level=is_byte_level):
        return None
    lengths = [len(token.content.encode()) for token in added]
    for token in library.get_vocab(with_added_tokens=False):
        as_bytes = byte_level_bytes(token) if is_byte_level else None
        lengths.append(len(token.encode() if as_bytes is None else as_bytes))
    return shrinking * max(lengths, default=1)


def may_backtrack(library: LibraryTokenizer) -> bool:
    """Whether an expression of the tokenizer repeats a group in which there is a choice, as (a+)*
    and (a|aa)+ do: the time of such a one can double with every character.
    """
    parts = [*_parts(library.normalizer, "normalizers")]
    parts += _parts(library.pre_tokenizer, "pretokenizers")
    patterns = [part.get("pattern") for part in parts]
    return any(
        repeats_a_choice(pattern["Regex"])
        for pattern in patterns
        if isinstance(pattern, dict) and "Regex" in pattern
    )


def repeats_a_choice(expression: str) -> bool:
    """Whether a group with alternatives or repetitions in it is itself repeated without bound."""
    return bool(_REPEATED_CHOICE.search(_GROUP_START.sub("(", _ATOM.sub("x", expression))))


def _is_growing(part: dict[str, Any]) -> bool:
    """Whether a normalizer puts something at least as long in the place of a fixed text."""
    if part["type"] != "Replace" or "String" not in part["pattern"]:
        return False
    return len(part["content"].encode()) >= len(part["pattern"]["String"].encode())


def _covers_everything(library: LibraryTokenizer, *, is_byte_level: bool) -> bool:
    """Whether every byte of a text becomes a part of a token of the vocabulary."""
    model = library.model
    if not isinstance(model, models.BPE):
        return False
    if is_byte_level:
        needed = list(BYTE_OF_LETTER)
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(library.token_to_id(token) is not None for token in needed)


def _parts(component: Any, members: str) -> Iterator[dict[str, Any]]:
    """The description of a component, sequences flattened."""
    if component is None:
        return
    try:
        waiting = [json.loads(component.__getstate__())]
    except Exception:  # the library's bare one: a part of it is code of ours, without expressions
        waiting = [{"type": "Custom"}]
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            waiting = [*part[members], *waiting]
        else:
            yield part
