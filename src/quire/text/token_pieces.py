"""The text of single ids, for the decoders in which ids contribute independently of each
other.

The `tokenizers` library decodes whole lists. For three kinds of decoder its result is a
concatenation of pieces, so a stream needs one table look-up per id:

* "byte_level": a token is a run of bytes, written with one letter per byte; the bytes together are
  UTF-8.
* "byte_fallback": a token is text (with "▁" for a blank) or one byte `<0xNN>`; a run of such bytes
  is UTF-8 as a whole, or each byte of it is U+FFFD; a blank may be stripped from the very
  beginning.
* "words": a token is text that depends on whether it is the first (Metaspace, WordPiece, no decoder
  at all).

Anything else is "other", for the library's own stream.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import Decoder

# What stands for bytes that are not a character.
REPLACEMENT = "\ufffd"

Kind = Literal["byte_level", "byte_fallback", "words", "other"]
# str: complete characters; bytes: a part of the UTF-8 stream.
Piece = str | bytes


class PieceTable(dict[int, Piece]):
    """Id -> piece, made when first asked for; ids outside the vocabulary and skipped tokens give
    "". `piece` is what the text of one token contributes.
    """

    def __init__(
        self, library: LibraryTokenizer, skipped: frozenset[str], piece: Callable[[str], Piece]
    ) -> None:
        super().__init__()
        self._library = library
        self._skipped = skipped
        self.piece = piece

    def __missing__(self, index: int) -> Piece:
        token = token_of(self._library, index)
        if token is None:
            return ""  # not kept: there are more wrong ids than memory
        piece = self[index] = "" if token in self._skipped else self.piece(token)
        return piece


def _byte_level_piece(token: str) -> Piece:
    """The bytes of the letters, as text if whole; a token with another letter is itself."""
    data = byte_level_bytes(token)
    if data is None:
        return token
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _byte_fallback_piece(replacements: list[tuple[str, str]], token: str) -> Piece:
    """One byte for `<0xNN>`, else the text after the decoder's replacements."""
    for old, new in replacements:
        token = token.replace(old, new)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token
    return token


def _word_piece(decoder: Decoder | None, is_first: bool, token: str) -> Piece:
    """The decoder's text of the token at the beginning, or after another one."""
    if decoder is None:
        return token if is_first else " " + token
    if is_first:
        return str(decoder.decode([token]))
    return str(decoder.decode(["x", token]))[1:]


class TokenPieces:
    """The piece tables of one tokenizer, shared by all its streams.

    `tables`: whether special tokens are skipped -> table; `first_tables`: the same for the first
    token of a text ("words" only). `num_stripped` and `stripped` ("byte_fallback"): how many
    leading `stripped` characters the decoder takes from the beginning of the whole text.
    """

    def __init__(self, library: LibraryTokenizer) -> None:
        self.library = library
        stages = _stages(library)
        self.kind: Kind = _kind(stages)
        strip = stages[-1] if stages and stages[-1]["type"] == "Strip" else None
        self.num_stripped = 0 if strip is None else int(strip["start"])
        self.stripped = "" if strip is None else str(strip["content"])
        added = library.get_added_tokens_decoder()
        self.added_texts: dict[int, str] = {index: t.content for index, t in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._replacements = [
            (stage["pattern"]["String"], stage["content"])
            for stage in stages
            if stage["type"] == "Replace" and "String" in stage["pattern"]
        ]
        self.tables = {skips: self._table(skips, is_first=False) for skips in (False, True)}
        self.first_tables = {skips: self._table(skips, is_first=True) for skips in (False, True)}

    def _table(self, skip_special_tokens: bool, is_first: bool) -> PieceTable:
        piece: Callable[[str], Piece] = partial(_word_piece, self.library.decoder, is_first)
        if self.kind == "byte_level":
            piece = _byte_level_piece
        elif self.kind == "byte_fallback":
            piece = partial(_byte_fallback_piece, self._replacements)
        skipped = self._special if skip_special_tokens else frozenset()
        return PieceTable(self.library, skipped, piece)


def byte_level_bytes(token: str) -> bytes | None:
    """The bytes that a byte-level token's letters stand for; None for any other letter."""
    if not _LETTERS.issuperset(token):
        return None
    return token.translate(_LATIN_OF_LETTER).encode("latin-1")


def token_of(library: LibraryTokenizer, index: int) -> str | None:
    """The token of an id, or None for whatever is not an id of the vocabulary."""
    try:
        return library.id_to_token(operator.index(index))
    # more than 32 bits, which the library cannot be asked for
    except (TypeError, OverflowError):
        return None


def _stages(library: LibraryTokenizer) -> list[dict[str, Any]]:
    """The decoder's description, a sequence flattened to its stages."""
    if library.decoder is None:
        return []
    # the library shows the parts of a decoder only in the state that it pickles, which is JSON
    description = json.loads(library.decoder.__getstate__())
    stages = description["decoders"] if description["type"] == "Sequence" else [description]
    return list(stages)


def _kind(stages: list[dict[str, Any]]) -> Kind:
    types = [stage["type"] for stage in stages]
    if types == ["ByteLevel"]:
        return "byte_level"
    if types in ([], ["Metaspace"], ["WordPiece"]):
        return "words"
    while types and types[0] == "Replace" and "String" in stages[0]["pattern"]:
        types, stages = types[1:], stages[1:]
    if types[:2] == ["ByteFallback", "Fuse"]:
        rest = stages[2:]
        # a stream cannot know the end, from which such a decoder would strip
        if not rest or (len(rest) == 1 and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0):
            return "byte_fallback"
    return "other"


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 is itself, the other 68 bytes are from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _letters_of_bytes()
"""The byte that a letter of a byte-level token stands for."""
_LETTERS = frozenset(BYTE_OF_LETTER)
_LATIN_OF_LETTER = {ord(letter): byte for letter, byte in BYTE_OF_LETTER.items()}
