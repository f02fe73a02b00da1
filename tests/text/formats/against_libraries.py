"""Tokenizer files against the libraries that they are made for, on hostile texts: ids, and texts
of ids that come one by one. Needs `pip install sentencepiece tiktoken`.

PYTHONPATH=src python -m tests.text.formats.against_libraries FILE...

Files: SentencePiece models, tekken.json and tokenizer.json. Names of special tokens are in none of
the texts: Quire finds these tokens in a text, and SentencePiece and tekken by themselves do not.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire.errors import EngineError
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
_EACH = 12
"""Characters of each category of Unicode."""


def texts(seed: int = 0) -> Iterator[str]:
    """Every category of Unicode, alone and mixed; runs of blanks and of one character."""
    draw = random.Random(seed)
    by_category: dict[str, list[str]] = defaultdict(list)
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        by_category[unicodedata.category(character)].append(character)
    del by_category["Cs"]  # surrogates cannot be encoded
    some = {kind: draw.sample(all_, min(_EACH, len(all_))) for kind, all_ in by_category.items()}
    for kind in sorted(some):
        yield from some[kind]
        yield "".join(some[kind])
        yield " ".join(some[kind])
        yield f"a{some[kind][0]}b {some[kind][-1]} c"
    mixed = [character for kind in sorted(some) for character in some[kind]]
    for _ in range(60):
        yield "".join(draw.choices(mixed, k=draw.randint(2, 30)))
    for blank in (" ", "\t", "\n", "\r\n", "\u3000", "\xa0", "\u200b", "\u2581"):
        for count in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64):
            yield blank * count
            yield f"x{blank * count}y"
            yield f"{blank * count}y{blank * count}"
    for run in ("a", "0", "=", "é", "日", "😀", "\u0301", "ab", "\0", "ﷺ"):
        yield run * 1000
    yield from (
        "",
        "The quick brown fox's 12345 jumps!",
        "def f(x):\n    return x  # 1\n",
        "1" * 20,
    )


def against(path: Path) -> list[str]:
    """What differs."""
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix == ".json" and "tekken" in path.name:
            shutil.copy(path, Path(folder) / "tekken.json")
            encode, decode = _tekken(path)
        elif path.suffix == ".json":
            shutil.copy(path, Path(folder) / "tokenizer.json")
            encode, decode = _library(path)
        else:
            shutil.copy(path, Path(folder) / "tokenizer.model")
            encode, decode = _sentencepiece(path)
        return list(_differences(Tokenizer.from_folder(folder), encode, decode))


def _differences(tokenizer: Tokenizer, encode: Encode, decode: Decode) -> Iterator[str]:
    unknown = tokenizer.unk_token_id
    for text in texts():
        expected = encode(text)
        found = tokenizer.encode(text, add_special_tokens=False)
        if found != expected:
            pieces = [tokenizer.convert_ids_to_tokens(ids) for ids in (found, expected)]
            yield f"ids of {text[:40]!r}: {pieces[0][:12]} instead of {pieces[1][:12]}"
        if unknown in expected:  # SentencePiece's text of it is for people, not the token's
            continue
        whole = decode(expected)
        if tokenizer.decode(expected) != whole:
            got = tokenizer.decode(expected)
            yield f"text of the ids of {text[:40]!r}: {got[:40]!r} instead of {whole[:40]!r}"
        stream = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
        streamed = "".join(stream.feed([index]) for index in expected)
        if streamed != whole:
            yield f"stream of the ids of {text[:40]!r}: {streamed[:40]!r} instead of {whole[:40]!r}"
    for text in ("\ud800", "a\udfffb"):
        try:
            tokenizer.encode(text)
        except EngineError:
            continue
        yield f"half a surrogate is taken: {text!r}"


def _sentencepiece(path: Path) -> tuple[Encode, Decode]:
    from sentencepiece import SentencePieceProcessor

    processor: Any = SentencePieceProcessor(model_file=str(path))
    return processor.encode, processor.decode


def _tekken(path: Path) -> tuple[Encode, Decode]:
    import tiktoken

    data = json.loads(path.read_text())
    config = data["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in data["vocab"][:count]}
    first = config["default_num_special_tokens"]
    inner = tiktoken.Encoding(
        path.stem, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    return (
        lambda text: [first + i for i in inner.encode_ordinary(text)],
        lambda ids: inner.decode([i - first for i in ids]),
    )


def _library(path: Path) -> tuple[Encode, Decode]:
    from tokenizers import Tokenizer as LibraryTokenizer

    library = LibraryTokenizer.from_file(str(path))
    library.no_padding()
    library.no_truncation()
    return (
        lambda text: library.encode(text, add_special_tokens=False).ids,
        lambda ids: library.decode(ids, skip_special_tokens=False),
    )


def main(paths: list[str]) -> int:
    has_failed = False
    for path in map(Path, paths):
        found = against(path)
        has_failed |= bool(found)
        print(f"{path.name}: {len(found)} of {len(list(texts()))} texts differ", flush=True)
        for line in found[:12]:
            print("   ", line, flush=True)
    return has_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
