"""llama.cpp's vocabulary files (`models/ggml-vocab-*.gguf`) against the ids that stand next to them
(`.inp`, `.out`), written as the tokenizer files that Quire reads:

PYTHONPATH=src python -m tests.text.formats.llama_cpp_vocabularies FILE...

The sdist of llama-cpp-python has them. `--against-library` also compares what becomes a
SentencePiece model with the sentencepiece package, on the texts of against_libraries.py. Left out
are vocabularies for which Quire has no file: WordPiece (`bert`), Gemma 4's without scores, and
byte-level ones whose pattern is known by a name alone.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.text.tokenizer import Tokenizer
from tests.text.formats.against_libraries import against

_NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BETWEEN = "\n__ggml_vocab_test__\n"
_NORMAL, _UNKNOWN, _UNUSED = 1, 2, 5
_CLASSES = {"gpt-2": "GPT2Tokenizer", "mpt": "GPTNeoXTokenizer", "qwen2": "Qwen2Tokenizer"}
"""Kinds of byte-level vocabularies that vocab.json and merges.txt of a class are."""


def facts_of(path: Path) -> dict[str, Any]:
    """The values of a file under `tokenizer.ggml.`."""
    data, at = path.read_bytes(), 8

    def number(form: str) -> Any:
        nonlocal at
        at += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, data, at - struct.calcsize("<" + form))[0]

    def string() -> bytes:
        nonlocal at
        size = number("Q")
        at += size
        return data[at - size : at]

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            return string()
        if kind != _ARRAY:
            return number(_NUMBERS[kind])
        inner, count = number("I"), number("Q")
        if inner not in _NUMBERS:
            return [value(inner) for _ in range(count)]
        form = f"<{count}{_NUMBERS[inner]}"
        at += struct.calcsize(form)
        return list(struct.unpack_from(form, data, at - struct.calcsize(form)))

    number("Q")  # of tensors
    found = {string().decode(): value(number("I")) for _ in range(number("Q"))}
    start = "tokenizer.ggml."
    return {name.removeprefix(start): v for name, v in found.items() if name.startswith(start)}


def write_folder(facts: dict[str, Any], folder: Path) -> bool:
    """Write a vocabulary as files that Quire reads; False where there are none for it."""
    kind, pattern = facts["model"].decode(), facts.get("pre", b"").decode()
    if kind in ("llama", "t5"):
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(facts))
    elif pattern in _CLASSES:
        _write_vocab_and_merges(facts, folder, _CLASSES[pattern])
    elif pattern == "llama-bpe":
        _write_tiktoken(facts, folder)
    else:
        return False
    return True


def sentencepiece_model(facts: dict[str, Any]) -> bytes:
    """A SentencePiece model of the same pieces."""
    is_unigram = facts["model"] == b"t5"
    kinds = [_UNUSED if kind == _UNKNOWN else kind for kind in facts["token_type"]]
    kinds[facts.get("unknown_token_id", 0)] = _UNKNOWN
    rows = zip(facts["tokens"], facts["scores"], kinds, strict=True)
    pieces = b"".join(
        _field(1, _field(1, piece) + b"\x15" + struct.pack("<f", score) + _varint(3, kind))
        for piece, score, kind in rows
    )
    trainer = _varint(3, 1 if is_unigram else 2) + _varint(35, 0 if is_unigram else 1)
    names = {"unknown": 40, "bos": 41, "eos": 42, "padding": 43}
    for name, number in names.items():
        trainer += _varint(number, facts.get(f"{name}_token_id", -1))
    normalizer = _field(2, bytes(b % 256 for b in facts.get("precompiled_charsmap", [])))
    normalizer += _varint(3, int(facts.get("add_space_prefix", True)))
    normalizer += _varint(4, int(facts.get("remove_extra_whitespaces", False))) + _varint(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _varint(field: int, value: int) -> bytes:
    return _base128(field << 3) + _base128(value % 2**64)


def _base128(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field(field: int, content: bytes) -> bytes:
    return _base128(field << 3 | 2) + _base128(len(content)) + content


def _write_vocab_and_merges(facts: dict[str, Any], folder: Path, class_name: str) -> None:
    tokens = [token.decode() for token in facts["tokens"]]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    merges = b"\n".join(facts["merges"]).decode()
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    added = {
        str(i): {"content": tokens[i], "special": True}
        for i, kind in enumerate(facts["token_type"])
        if kind != _NORMAL
    }
    config = {"tokenizer_class": class_name, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_tiktoken(facts: dict[str, Any], folder: Path) -> None:
    bytes_of = {character: bytes([byte]) for byte, character in _byte_characters().items()}
    lines, added = [], {}
    for i, (token, kind) in enumerate(zip(facts["tokens"], facts["token_type"], strict=True)):
        if kind == _NORMAL:
            raw = b"".join(bytes_of[character] for character in token.decode())
            lines.append(f"{base64.b64encode(raw).decode()} {i}")
        else:
            added[str(i)] = {"content": token.decode(), "special": True}
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def _byte_characters() -> dict[int, str]:
    """GPT-2's characters of bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def differences(path: Path) -> list[str] | None:
    """What differs from the ids next to a file; None where it has none, or no form here."""
    texts, ids = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    with tempfile.TemporaryDirectory() as name:
        if not texts.exists() or not write_folder(facts_of(path), Path(name)):
            return None
        tokenizer = Tokenizer.from_folder(name)
    given = texts.read_bytes().decode().split(_BETWEEN)
    expected = [[int(i) for i in line.split()] for line in ids.read_text().split("\n")]
    assert len(given) <= len(expected), "a line of ids for each text"
    found = [tokenizer.encode(text, add_special_tokens=False) for text in given]
    return [
        f"{text[:60]!r}: {mine[:12]} instead of {its[:12]}"
        for text, mine, its in zip(given, found, expected, strict=False)
        if mine != its
    ]


def _against_library(path: Path) -> list[str] | None:
    facts = facts_of(path)
    if facts["model"] not in (b"llama", b"t5"):
        return None
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "pieces.model"
        model.write_bytes(sentencepiece_model(facts))
        return against(model)


def main(arguments: list[str]) -> int:
    compare: Callable[[Path], list[str] | None] = differences
    if "--against-library" in arguments:
        compare = _against_library
    has_failed = False
    for path in (Path(each) for each in arguments if not each.startswith("--")):
        found = compare(path)
        has_failed |= bool(found)
        print(f"{path.name}: {'left out' if found is None else f'{len(found)} differ'}", flush=True)
        for line in (found or [])[:8]:
            print("   ", line, flush=True)
    return has_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
