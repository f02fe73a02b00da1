"""The vocabulary for grammars: the bytes that each token adds to a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import LoadError
from quire.text.token_pieces import REPLACEMENT, byte_level_bytes
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """The source of a vocabulary: the tokenizer's folder, the number V of ids that the model has,
    and ids that end a text in addition to the tokenizer's own.
    """

    folder: str
    mode: str
    size: int
    eos_token_ids: tuple[int, ...] = ()


class Vocabulary:
    """Bytes by token id, as the detokeniser writes them, and which ids are not text at all.

    `tokens` has V entries, b"" for ids that the tokenizer does not know. `special_ids` are control
    tokens, `eos_ids` those of them that end a text. Calling it encodes a text into ordinary tokens.
    It modifies the tokenizer: any other user of it encodes without control tokens from then on.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int] = ()) -> None:
        library = tokenizer.library
        eos = [tokenizer.eos_token_id, *eos_token_ids]
        self.eos_ids = [index for index in dict.fromkeys(eos) if index is not None and index < size]
        if not self.eos_ids:
            raise LoadError("The model names no token that ends a text, which grammars need.")
        special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
        self.special_ids = sorted(i for i in special | set(self.eos_ids) if i < size)
        self.special_texts = {library.id_to_token(index): index for index in self.special_ids}
        self.tokens = _token_bytes(tokenizer, size)
        library.encode_special_tokens = True  # the texts of control tokens mean nothing
        library.no_padding()
        library.no_truncation()
        self._library = library

    @classmethod
    def read(cls, source: VocabularySource) -> Vocabulary:
        """Load it from the tokenizer's files. Raises LoadError where tokens have no bytes."""
        tokenizer = Tokenizer.from_folder(Path(source.folder), mode=source.mode)
        return cls(tokenizer, source.size, source.eos_token_ids)

    @property
    def eos_token_id(self) -> int:
        return self.eos_ids[0]

    @property
    def bos_token_id(self) -> None:
        """Never part of a text that a grammar describes."""
        return None

    @property
    def special_token_ids(self) -> list[int]:
        return self.special_ids

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokenizer's ids of a text; texts of control tokens are letters like all others."""
        if isinstance(text, bytes):
            text = text.decode()
        return list(self._library.encode(text, add_special_tokens=False).ids)


def _token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    if tokenizer.pieces.kind == "other":
        raise LoadError("Structured output needs a tokenizer whose tokens have bytes of their own.")
    is_byte_level = tokenizer.pieces.kind == "byte_level"
    table = tokenizer.pieces.tables[False]
    tokens = [b""] * size
    for token, index in tokenizer.get_vocab().items():
        if index < size:
            # None for a token that was added to the vocabulary, whose text is its own
            data = byte_level_bytes(token) if is_byte_level else None
            tokens[index] = _encoded(table.piece(token)) if data is None else data
    return tokens


def _encoded(piece: str | bytes) -> bytes:
    data = piece if isinstance(piece, bytes) else piece.encode()
    # a token that is not a character by itself has no known bytes, and is never allowed
    return b"" if data == REPLACEMENT.encode() else data
