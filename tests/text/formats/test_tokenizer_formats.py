"""Tokenizers from SentencePiece, tekken and tiktoken files.

`sentencepiece.json` has two models of 500 pieces that the sentencepiece package (0.2.3) trained on
an English text, without normalisation, and the ids that it gives to some texts. `blanks.json` has
two of 420 pieces, trained on this project's README.md and docs/models.md, in which runs of two to
eight blanks are user-defined.
"""

import base64
import json
import re
import struct
from pathlib import Path

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts
from quire.errors import LoadError
from quire.testing import make_checkpoint
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_formats.character_map import CharacterMap
from quire.text.tokenizer_formats.folder import mistral_file

GOLDEN = json.loads((Path(__file__).parent / "sentencepiece.json").read_text())
BLANKS = json.loads((Path(__file__).parent / "blanks.json").read_text())


def write_golden(folder, kind, name="tokenizer.model", golden=GOLDEN):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(base64.b64decode(golden[kind]["model"]))
    return folder


@pytest.mark.parametrize("kind", GOLDEN)
def test_sentencepiece_gives_the_ids_of_its_package(tmp_path, kind):
    tokenizer = Tokenizer.from_folder(write_golden(tmp_path, kind))
    for text, ids in GOLDEN[kind]["ids"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.encode("Hello") == [1, *tokenizer.encode("Hello", add_special_tokens=False)]
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert tokenizer.special_tokens_map == roles


def test_sentencepiece_decodes_bytes_and_blanks(tmp_path):
    tokenizer = Tokenizer.from_folder(write_golden(tmp_path, "bpe"))
    for text, ids in GOLDEN["bpe"]["ids"]:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", BLANKS)
def test_user_defined_runs_of_blanks_are_whole_pieces(tmp_path, kind):
    tokenizer = Tokenizer.from_folder(write_golden(tmp_path, kind, golden=BLANKS))
    for text, ids in BLANKS[kind]["ids"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a     b"))[2] == "\u2581" * 5


def test_of_equal_scores_the_leftmost_pair_is_merged(tmp_path):
    """Runs of blanks have one score in Llama's and Mistral's files; lengths are sentencepiece's."""
    runs = [piece("\u2581" * n, -1e9) for n in (*range(1, 15), 16)]
    as_it_is = message(3, b"\x18\x00\x20\x00")
    content = KNOWN + b"".join(runs) + message(2, TRAINER) + as_it_is
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = Tokenizer.from_folder(tmp_path)
    expected = {15: [14, 1], 16: [16], 17: [16, 1], 24: [16, 8], 31: [16, 14, 1], 34: [16, 16, 2]}
    for count, lengths in expected.items():
        ids = tokenizer.encode(" " * count, add_special_tokens=False)
        assert [len(p) for p in tokenizer.convert_ids_to_tokens(ids)] == lengths


def test_side_files_rule_over_the_model(tmp_path):
    write_golden(tmp_path, "bpe")
    config = {"add_bos_token": False, "eos_token": "[TOOL]", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a")[0] != 1
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("[TOOL]", "<s>")
    assert tokenizer.pad_token is None


def number(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def message(field, content):
    return number(field << 3 | 2) + number(len(content)) + content


def piece(text, score=0.0, kind=1):
    fields = message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + number(kind)
    return message(1, fields)


KNOWN = piece("<unk>", 0, 2)
TRAINER = b"\x18\x02"


def character_table(rules):
    """The table of a model whose normalizer replaces texts: a double array, and the values."""
    trie, values, units, bases, taken = {}, b"", {0: 0}, set(), {0}
    for key, value in rules.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[0] = len(values)
        values += value.encode() + b"\0"

    def place(node, at):
        free = (b for b in range(1, 4096) if b not in bases)
        base = next(b for b in free if not taken & {b ^ byte for byte in node})
        bases.add(base)
        taken.update(base ^ byte for byte in node)
        units[at] |= (at ^ base) << 10 | (0 in node) << 8
        for byte, below in node.items():
            units[base ^ byte] = byte if byte else 1 << 31 | below
            if byte:
                place(below, base ^ byte)

    place(trie, 0)
    array = b"".join(units.get(at, 0).to_bytes(4, "little") for at in range(max(units) + 256))
    return len(array).to_bytes(4, "little") + array + values


RULES = dict(
    [("\r", " "), ("\n", " "), ("\x07", ""), ("Ａ", "A"), ("ﬁ", "fi"), ("a\u0306", "ă")]
    + [("a\u0306\u0301", "ắ"), ("ᄒ", "h"), ("ᄒ\u1161", "하"), ("ᄒ\u1161\u11ab", "한")]
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("x\r\ny\r\r\n", "x  y   "),
        ("Ａ\u0323", "A\u0323"),
        ("ﬁ\u0301ﬁ", "fi\u0301fi"),
        ("a\u0306\u0301a\u0306a", "ắăa"),
        ("ᄒ\u1161\u11abᄒ\u1161ᄒ", "한하h"),
        ("\U000f0000\x07ﬁ\x07", "\U000f0000fi"),
        ("\x07", ""),
        ("plain", "plain"),
    ],
)
def test_characters_become_what_the_longest_rule_says(tmp_path, text, normal):
    unchanged = b"\x18\x00\x20\x00" + message(2, character_table(RULES))
    letters = b"".join(piece(c) for c in ("\u2581", *dict.fromkeys("xyAfiăắ한하hplna\u0301\u0323")))
    content = KNOWN + letters + piece("\U000f0000") + message(2, TRAINER) + message(3, unchanged)
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = Tokenizer.from_folder(tmp_path)
    tokens = tokenizer.tokenize(text)
    assert "".join(tokens).replace("\u2581", " ") == normal
    assert tokenizer.beginning(f"ﬁxx{text}", 2) == "ﬁ"


class CountedText:
    """A text that counts the passes over it, as `tokenizers.NormalizedString` has them."""

    def __init__(self, text):
        self.normalized, self.passes = text, 0

    def map(self, change):
        self.passes += 1
        self.normalized = "".join(map(change, self.normalized))

    def replace(self, old, new):
        self.passes += 1
        self.normalized = self.normalized.replace(old, new)


def test_the_cost_of_normalising_does_not_grow_with_the_values_of_a_text(monkeypatch):
    values = {chr(0x3400 + i): f"{i:04}" if i % 2 else f"{i:05}" for i in range(200)}
    table = CharacterMap(character_table(values))
    walked = []
    walk = table._walk
    monkeypatch.setattr(table, "_walk", lambda data: walked.append(data) or walk(data))
    letters = "plain text of many letters " * 40
    for times in (1, 3):
        text = CountedText(("".join(values) + letters) * times)
        table.normalize(text)
        assert text.normalized == ("".join(values.values()) + letters) * times
        assert text.passes == 4
    assert len(walked) <= len({*letters, *values})
    plain = CountedText(letters)
    table.normalize(plain)
    assert plain.passes == 0


@pytest.mark.parametrize(("text", "decoded"), [("\u2581x \u2581\u2581", "x"), ("\u2581\u2581", "")])
def test_marks_of_blanks_at_the_ends_are_extra_blanks(tmp_path, text, decoded):
    content = KNOWN + piece("\u2581") + piece("x") + message(2, TRAINER)
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581", "\u2581", "x"][: 3 * len(decoded)]
    stream = IncrementalDetokenizer(tokenizer, [])
    assert tokenizer.decode(ids) == "".join(stream.feed([i]) for i in ids) == decoded


SPOILED = {
    "empty": (b"", "it has no pieces"),
    "not one": (b"\x0a\xff\xff\xff", "ends in the middle"),
    "a text": (b"hello world", "not a SentencePiece model"),
    "a long number": (b"\xff" * 20, "more than 64 bits"),
    "two unknown": (KNOWN + piece("?", 0, 2), "not exactly one piece for what it does not know"),
    "none unknown": (piece("a"), "not exactly one piece"),
    "twice": (KNOWN + piece("a") + piece("a"), "pieces that are empty or equal"),
    "without text": (KNOWN + piece(""), "pieces that are empty or equal"),
    "no score": (KNOWN + piece("a", float("nan")), "whose score is not a number"),
    "words": (KNOWN + message(2, b"\x18\x03"), "pieces of type 3"),
    "suffixes": (KNOWN + message(2, TRAINER + number(24 << 3) + b"\1"), "at the end of its pieces"),
    "half a character": (message(1, message(1, b"\xff")), "can't decode byte"),
    "a field of another type": (message(1, b"\x08\x01"), "another type"),
    "a long piece": (KNOWN + piece("a" * 2000), "more than 1024 characters"),
    "a run of blanks": (
        KNOWN + piece("\u2581") + piece("\u2581" * 3, kind=4) + message(2, TRAINER),
        "a user-defined piece of 3 blanks",
    ),
    "a table of nonsense": (KNOWN + message(3, message(2, b"\xff" * 9)), "another size than it"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_sentencepiece_model_is_one_sentence(tmp_path, case):
    content, says = SPOILED[case]
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(LoadError, match=says) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_cut_of_a_sentencepiece_model_escapes(tmp_path):
    content = base64.b64decode(GOLDEN["bpe"]["model"])
    for end in range(0, len(content), 311):
        (tmp_path / "tokenizer.model").write_bytes(content[:end])
        try:
            Tokenizer.from_folder(tmp_path)
        except LoadError as error:
            assert str(error)


# tokens of bytes with ranks

PATTERN = r"\S+|\s+"
MERGED = [b"he", b"hel", b"lo", b"hello", b" w", b"or", b"wor", b"ld", b"aa", b"aaa", b"\xc3\xa9"]
RANKS = {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *MERGED])}
TEXTS = ["hello world", "aaaaa aaaa", "héllo", "", "  \n", "日本 hellold", "lohello"]


def byte_pairs(text):
    """Ranks of a text's tokens: neighbours join by the lowest rank, the first of several."""
    ids = []
    for word in re.findall(PATTERN, text):
        parts = [bytes([b]) for b in word.encode()]
        while True:
            joined = [RANKS.get(a + b, 10**9) for a, b in zip(parts, parts[1:], strict=False)]
            if not joined or min(joined) == 10**9:
                break
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


def tekken(**changes):
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(RANKS),
        "default_vocab_size": len(RANKS) + 30,
        "default_num_special_tokens": 30,
        "version": "v3",
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    return {"config": config, "vocab": vocab, **changes}


def write_tekken(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def test_tekken_merges_by_rank(tmp_path):
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path, tekken()))
    for text in TEXTS:
        ids = [30 + rank for rank in byte_pairs(text)]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]hello[/INST]") == [1, 3, 30 + RANKS[b"hello"], 4]
    assert tokenizer.decode([25]) == "<SPECIAL_25>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    assert tokenizer.vocab_size == len(RANKS) + 30


def test_tekken_lists_its_special_tokens_since_v11(tmp_path):
    listed = [{"rank": 0, "token_str": "<s>", "is_control": True}, {"rank": 7, "token_str": "[A]"}]
    content = tekken(special_tokens=listed)
    content["config"]["version"] = "v13"
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path, content))
    assert tokenizer.encode("[A]") == [0, 7]
    content["special_tokens"] = None
    with pytest.raises(LoadError, match="lists no special_tokens"):
        Tokenizer.from_folder(write_tekken(tmp_path, content))


def edited(edit):
    content = tekken()
    edit(content)
    return content


TEKKENS = {
    "a list": ([], "is not a tekken file"),
    "no pattern": (edited(lambda c: c["config"].pop("pattern")), "is not a tekken file"),
    "no base64": (edited(lambda c: c["vocab"][3].update(token_bytes="%%")), "not base64"),
    "a rank twice": (edited(lambda c: c["vocab"][3].update(rank=4)), "ranks that are not 0, 1"),
    "a rank too far": (edited(lambda c: c["vocab"][3].update(rank=2**62)), "ranks that are not"),
    "a token twice": (edited(lambda c: c["vocab"][3].update(token_bytes="AA==")), "or equal"),
    "a byte less": (edited(lambda c: c.update(vocab=c["vocab"][:200])), "56 of the 256 bytes"),
    "no room": (edited(lambda c: c["config"].update(default_vocab_size=30)), "which cannot be"),
    "absurd": (edited(lambda c: c["config"].update(default_vocab_size=10**12)), "cannot be"),
    "pattern": (edited(lambda c: c["config"].update(pattern="(")), "is not a BPE model"),
    "special": (
        tekken(special_tokens=[{"rank": 99, "token_str": "x"}]),
        "equal texts, or ids beyond 29",
    ),
}


@pytest.mark.parametrize("case", TEKKENS)
def test_a_spoiled_tekken_file_is_one_sentence(tmp_path, case):
    content, says = TEKKENS[case]
    with pytest.raises(LoadError, match=says) as caught:
        Tokenizer.from_folder(write_tekken(tmp_path, content))
    assert "\n" not in str(caught.value)


def write_tiktoken(folder, name, model_type, ranks=RANKS):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / name).write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    count = len(RANKS)
    config = {
        "added_tokens_decoder": {
            str(count + 5): {"content": "[EOS]", "special": True},
            str(count + 2): {"content": "<|user|>", "special": True},
        },
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "kimi.tiktoken"])
def test_tiktoken_with_the_pattern_of_the_model(tmp_path, name):
    tokenizer = Tokenizer.from_folder(write_tiktoken(tmp_path, name, "kimi_k2"))
    hello, world = RANKS[b"hello"], [RANKS[b" w"], RANKS[b"or"], RANKS[b"ld"]]
    assert tokenizer.encode("hello world") == [hello, *world]
    assert tokenizer.encode("<|user|>hello") == [len(RANKS) + 2, hello]
    assert tokenizer.eos_token_id == len(RANKS) + 5


def test_a_piece_of_text_that_is_a_token_is_that_token(tmp_path):
    """Also where no two others make it, as in Llama 3's vocabulary (" Việt")."""
    ranks = {**RANKS, b" qzx": len(RANKS)}
    folder = write_tiktoken(tmp_path / "tiktoken", "tiktoken.model", "llama", ranks)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"], config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hello qzx") == [RANKS[b"hello"], len(RANKS)]
    assert len(tokenizer.encode("hello qzxy")) == 6  # within a word it is not made


def test_tiktoken_of_other_models_needs_code(tmp_path):
    with pytest.raises(LoadError, match="only in code of the repository .model_type 'qwen'"):
        Tokenizer.from_folder(write_tiktoken(tmp_path, "qwen.tiktoken", "qwen"))


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ({**RANKS, b"x": 3}, "ranks that are not 0, 1"),
        ({b"a": 0}, "255 of the 256 bytes"),
        ({token + b"=": rank for token, rank in RANKS.items()}, "256 of the 256 bytes"),
    ],
)
def test_a_spoiled_tiktoken_file_is_one_sentence(tmp_path, ranks, says):
    folder = write_tiktoken(tmp_path, "tiktoken.model", "kimi_k2", ranks)
    with pytest.raises(LoadError, match=says):
        Tokenizer.from_folder(folder)


# which file counts


def test_modes_choose_between_files(tmp_path):
    write_tekken(write_golden(tmp_path, "bpe"), tekken())
    assert Tokenizer.from_folder(tmp_path).encode("[INST]") == [1, 3]
    assert Tokenizer.from_folder(tmp_path, mode="hf").encode("[TOOL]")[-1] == 4
    assert Tokenizer.from_folder(tmp_path, mode="mistral").encode("[INST]") == [1, 3]
    (tmp_path / "tekken.json").unlink()
    write_golden(tmp_path, "unigram", "tokenizer.model.v3")
    ours = Tokenizer.from_folder(tmp_path, mode="mistral")
    assert ours.vocab_size == 500 and ours.library.model.__class__.__name__ == "Unigram"
    with pytest.raises(LoadError, match=r"neither tekken\.json nor tokenizer\.model"):
        Tokenizer.from_folder(tmp_path.parent, mode="mistral")


def test_a_plan_names_the_mode(tmp_path):
    folder = make_checkpoint(tmp_path / "model", {"num_hidden_layers": 1}, "llama")

    def mode(**given):
        return gather_model_facts(EngineArgs(model=str(folder), **given)).tokenizer_mode

    assert mode() == "hf" and mode(tokenizer_mode="mistral") == "mistral"
    for file in folder.glob("tokenizer*"):
        file.unlink()
    write_tekken(folder, tekken())
    assert mode() == "mistral" and mode(skip_tokenizer_init=True) == "hf"


def test_the_highest_version_of_mistral_s_files_is_read(tmp_path):
    for version in ("v1", "v3", "v7m1", "v11"):
        (tmp_path / f"tokenizer.model.{version}").write_bytes(b"x")
    assert mistral_file(tmp_path).suffix == ".v11"
    (tmp_path / "tokenizer.model.v11").unlink()
    assert mistral_file(tmp_path).suffix == ".v7m1"
