"""The product of a reader of tokenizer files."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer as LibraryTokenizer


@dataclass(frozen=True, slots=True)
class ForeignTokenizer:
    """The library's object, and what the file says that other formats have in side files: the
    tokens of roles such as "bos_token". `adds_bos`: prompts begin with it unless a side file says
    otherwise.
    """

    library: LibraryTokenizer
    roles: dict[str, str] = field(default_factory=dict)
    adds_bos: bool = False
