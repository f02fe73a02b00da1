"""Builds the byte-level BPE of folders with vocab.json and merges.txt but no tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from quire.errors import LoadError
from quire.text.json_files import read_value
from quire.text.model_files import MOST_VOCABULARY_BYTES, read_text
from quire.text.token_pieces import BYTE_OF_LETTER

# How Qwen2 cuts text before BPE (transformers models/qwen2/tokenization_qwen2.py, the published
# pattern): contractions, words with one leading sign, single digits, signs with trailing newlines,
# newlines, spaces.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that UTF-8 does not have, and that the vocabulary of GPT-NeoX and MPT lacks."""
_CLASSES = ("GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")


def build_from_vocab_and_merges(
    vocab: Path, merges: Path, class_name: str | None, add_prefix_space: bool
) -> LibraryTokenizer:
    """Byte-level BPE over `vocab` and `merges`: GPT-2's way, or Qwen2's for that class.

    Raises LoadError for unreadable files, for a vocabulary that is not byte-level, and for another
    class, whose rules these two files do not hold.
    """
    if class_name is not None and class_name not in _CLASSES:
        raise LoadError(
            f"{vocab.parent} has vocab.json and merges.txt for {class_name}, whose rules are only "
            f"in tokenizer.json; "
            f"run `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` once with "
            f"transformers to write it."
        )
    model = _read_model(vocab, merges)
    tokenizer = LibraryTokenizer(model)
    if class_name in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(class_name, add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_model(vocab: Path, merges: Path) -> models.BPE:
    try:
        table = read_value(vocab, MOST_VOCABULARY_BYTES)
        lines = read_text(merges, MOST_VOCABULARY_BYTES).split("\n")
        pairs = [line for line in lines if line.strip()]
        # only in the first line: a merge may begin with "#" as well
        pairs = pairs[1:] if pairs and pairs[0].startswith("#version") else pairs
        model = models.BPE(
            vocab=table,
            merges=[_pair(line.rstrip("\r")) for line in pairs],
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    except (
        Exception
    ) as error:  # the library raises bare Exception for merges outside the vocabulary
        raise LoadError(f"{vocab} and {merges.name} are not a BPE model: {error}.") from error
    missing = [c for c, byte in BYTE_OF_LETTER.items() if c not in table and byte not in _NEVER]
    if missing:
        raise LoadError(
            f"{vocab} is not a byte-level vocabulary ({len(missing)} symbols of bytes are "
            f"missing); "
            f"such a tokenizer needs its tokenizer.json."
        )
    return model


def _pair(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def _pre_tokenizer(class_name: str | None, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    if class_name != "Qwen2Tokenizer":
        return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )
