"""The comparison with llama.cpp's vocabularies, on small ones that are written here."""

import json
import struct

import pytest

from tests.text.formats.llama_cpp_vocabularies import differences
from tests.text.tokenizer_folders import byte_level, write_vocab_and_merges

TEXTS = ["hello world", "", "  \n", "isn't 日本 12"]


def text(value):
    return struct.pack("<Q", len(value)) + value


def array(kind, values):
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def write(folder, facts, ids, texts):
    """A file without tensors, and the texts and ids next to it."""
    values = b"".join(
        text(f"tokenizer.ggml.{name}".encode()) + struct.pack("<I", kind) + value
        for name, (kind, value) in facts.items()
    )
    path = folder / "ggml-vocab-tiny.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(facts)) + values)
    path.with_suffix(".gguf.inp").write_text("\n__ggml_vocab_test__\n".join(texts))
    lines = [" " + " ".join(map(str, each)) + "\n" for each in ids]
    path.with_suffix(".gguf.out").write_text("".join(lines))
    return path


def byte_level_facts(folder):
    write_vocab_and_merges(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().split("\n")[1:-1]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "model": (8, text(b"gpt2")),
        "pre": (8, text(b"gpt-2")),
        "tokens": (9, array(8, [text(token.encode()) for token in tokens])),
        "token_type": (9, array(5, [struct.pack("<i", 1)] * len(tokens))),
        "merges": (9, array(8, [text(merge.encode()) for merge in merges])),
    }


def test_a_byte_level_vocabulary_has_the_ids_next_to_it(tmp_path):
    facts, library = byte_level_facts(tmp_path / "files"), byte_level()
    ids = [library.encode(each).ids for each in TEXTS]
    path = write(tmp_path, facts, ids, TEXTS)
    assert differences(path) == []
    ids[3] = [*ids[3][:-1], ids[3][-1] + 1]
    [found] = differences(write(tmp_path, facts, ids, TEXTS))
    assert found.startswith(repr(TEXTS[3]))


@pytest.mark.parametrize("planted", [0, 1])
def test_pieces_with_scores_become_a_sentencepiece_model(tmp_path, planted):
    pieces = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), *_bytes()]
    first = len(pieces)
    pieces += [("▁a", -1, 1), ("bc", -2, 1), *((c, -9, 1) for c in "▁abc")]
    facts = {
        "model": (8, text(b"llama")),
        "tokens": (9, array(8, [text(each.encode()) for each, _, _ in pieces])),
        "scores": (9, array(6, [struct.pack("<f", score) for _, score, _ in pieces])),
        "token_type": (9, array(5, [struct.pack("<i", kind) for _, _, kind in pieces])),
        "unknown_token_id": (4, struct.pack("<I", 0)),
    }
    path = write(tmp_path, facts, [[first, first + 1 - planted]], ["abc"])
    assert len(differences(path)) == planted


def _bytes():
    return [(f"<0x{byte:02X}>", 0, 6) for byte in range(256)]
