"""Byte-level BPE from tokens with ranks, as tiktoken and tekken files have them.

A piece of text that is a token is that token. In others, the two neighbours merge whose joined
bytes have the lowest rank. The library merges by a list of pairs; one with every division of every
token into two others, by the token's rank, does the same (transformers' TikTokenConverter makes
this list, too).
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from quire.errors import LoadError
from quire.text.token_pieces import BYTE_OF_LETTER

MOST_TOKEN_BYTES = 1024
"""Most bytes of a token, whose divisions grow with it; the longest published has 256 blanks."""


def check_ranks(ranks: Mapping[bytes, int], count: int, place: str) -> None:
    """Raise LoadError, naming `place`, unless these are `count` tokens with ranks from 0 on."""
    if sorted(ranks.values()) != list(range(count)) or b"" in ranks:
        raise LoadError(
            f"{place} has tokens that are empty or equal, or ranks that are not 0, 1, ..."
        )


def build_byte_pairs(
    ranks: Mapping[bytes, int],
    special: Mapping[int, AddedToken],
    *,
    first_id: int,
    pattern: str,
    place: str,
) -> LibraryTokenizer:
    """Make the tokenizer of tokens with ranks, whose ids begin at `first_id`, and of special tokens
    by id.

    `pattern` cuts texts before BPE. Raises LoadError, which names `place`, for what is not a
    byte-level vocabulary.
    """
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise LoadError(
            f"{place} has no tokens for {len(missing)} of the 256 bytes: it is not a byte-level "
            "vocabulary."
        )
    longest = max(map(len, ranks))
    if longest > MOST_TOKEN_BYTES:
        raise LoadError(f"{place} has a token of {longest} bytes; at most {MOST_TOKEN_BYTES}.")
    symbols = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    texts = {token.decode("latin-1").translate(symbols): rank for token, rank in ranks.items()}
    vocab = {text: first_id + rank for text, rank in texts.items()}
    vocab |= {token.content: index for index, token in special.items()}
    merges = _divisions(texts)
    taken = {token.content for token in special.values()}
    if not taken.isdisjoint(texts):
        # in `vocab` such a text has the special token's id, which plain text must not become by
        # merging
        merges = [(a, b) for a, b in merges if a + b not in taken]
    try:
        model = models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True)
        library = LibraryTokenizer(model)
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{place} is not a BPE model: {error}.") from error
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    library.decoder = decoders.ByteLevel()
    library.add_tokens([special[index] for index in sorted(special)])
    return library


def _divisions(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that form a token, by its rank and then by theirs."""
    found: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in ranks and token[at:] in ranks
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += pairs
    return found
