"""The tokenizer against transformers' AutoTokenizer on the same folders."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidParameter, InvalidType, LoadError, UnknownParameter
from quire.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import (
    CLASSES,
    load_both,
    write_folder,
    write_json,
    write_vocab_and_merges,
)

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  blanks ,  and . more ! isn't it ' s ",
    "Größe 😀👩‍👩‍👧 你好 \n\n\ttab",
    "<s>hello</s> <|im_start|>user<|im_end|>",
    "[CLS] the [SEP]",
    "(a) cafe\u0301",
    "\x00\x7f\u200b\ufffd",
    "a" * 300,
]


def assert_same(ours: Tokenizer, oracle: Any) -> None:
    for text, special in product(TEXTS, (True, False)):
        expected = oracle.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == expected, text
        for skip in (True, False):
            assert ours.decode(expected, skip) == oracle.decode(expected, skip_special_tokens=skip)
    assert len(ours) == len(oracle)
    assert ours.get_vocab() == oracle.get_vocab()
    assert ours.all_special_tokens == oracle.all_special_tokens
    assert ours.all_special_ids == oracle.all_special_ids
    assert ours.special_tokens_map == oracle.special_tokens_map
    for role in ("bos", "eos", "pad", "unk"):
        for name in (f"{role}_token", f"{role}_token_id"):
            assert getattr(ours, name) == getattr(oracle, name), name
    assert ours.get_added_vocab() == oracle.get_added_vocab()
    assert {i: str(t) for i, t in oracle.added_tokens_decoder.items()} == ours.added_token_texts


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_encodes_and_decodes_as_transformers(tmp_path: Path, kind: str) -> None:
    ours, oracle = load_both(write_folder(tmp_path, kind))
    assert_same(ours, oracle)
    assert ours.vocab_size == max(oracle.get_vocab().values()) + 1


SPECIAL_FORMS = {
    "text": {"eos_token": "</s>", "pad_token": "<s>", "additional_special_tokens": ["<|im_end|>"]},
    "object": {
        "eos_token": {
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
        }
    },
    "new tokens": {"pad_token": "[NEW]", "extra_special_tokens": ["<extra 0>", "<extra 1>"]},
    "model specific": {
        "image_token": "<image>",
        "extra_special_tokens": {"audio_token": "<audio>"},
    },
    "added decoder": {
        "added_tokens_decoder": {
            "0": {"content": "<s>", "special": True},
            "1": {"content": "</s>", "special": True, "rstrip": True},
            "2": {"content": "<|im_start|>", "special": False, "lstrip": True},
        }
    },
    "no roles": {"bos_token": None, "eos_token": None},
    "split special": {"split_special_tokens": True},
}


@pytest.mark.parametrize("form", SPECIAL_FORMS)
def test_special_and_added_tokens_are_read_in_every_form(tmp_path: Path, form: str) -> None:
    assert_same(*load_both(write_folder(tmp_path, "byte_level", SPECIAL_FORMS[form])))


@pytest.mark.parametrize("listed", [False, True], ids=["map rules", "listed tokens rule"])
def test_special_tokens_map_counts_only_without_listed_added_tokens(
    tmp_path: Path, listed: bool
) -> None:
    tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": True}, "pad_token": "</s>"}
    config = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}} if listed else {}
    ours, oracle = load_both(write_folder(tmp_path, "byte_level", config, tokens))
    assert_same(ours, oracle)
    assert ours.eos_token == ("</s>" if listed else "<|im_end|>")


def test_added_tokens_json_of_old_folders(tmp_path: Path) -> None:
    folder = write_vocab_and_merges(
        tmp_path,
        {
            "tokenizer_class": "GPT2Tokenizer",
            "eos_token": "<new>",
            "bos_token": "<new>",
            "unk_token": "<new>",
        },
    )
    write_json(folder / "added_tokens.json", {"<new>": 421, "<other>": 422})
    ours, oracle = load_both(folder)
    assert_same(ours, oracle)
    assert ours.eos_token_id == 421


FLAGS = [
    {k: v for k, v in zip(("add_bos_token", "add_eos_token"), values, strict=True) if v is not None}
    for values in product((None, True, False), repeat=2)
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_flags_follow_transformers(tmp_path: Path, flags: dict[str, bool], kind: str) -> None:
    assert_same(*load_both(write_folder(tmp_path, kind, flags)))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_flags_rule_where_there_is_no_tokenizer_json(
    tmp_path: Path, flags: dict[str, bool]
) -> None:
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<s>",
        **flags,
    }
    ours, oracle = load_both(write_vocab_and_merges(tmp_path, config))
    assert_same(ours, oracle)
    assert (ours.encode("hello")[0] == ours.bos_token_id) == flags.get("add_bos_token", False)


def test_a_flag_against_the_post_processor_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Tokenizer.from_folder(write_folder(tmp_path, "byte_level", {"add_bos_token": True}))
    assert "add_bos_token=True" in caplog.text
    caplog.clear()
    Tokenizer.from_folder(write_folder(tmp_path, "byte_fallback", {"add_bos_token": True}))
    assert not caplog.text


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer", "GPT2TokenizerFast"])
@pytest.mark.parametrize("prefix_space", [False, True], ids=["plain", "prefix space"])
def test_vocab_and_merges_without_tokenizer_json(
    tmp_path: Path, class_name: str, prefix_space: bool
) -> None:
    config = {"tokenizer_class": class_name, "add_prefix_space": prefix_space, "bos_token": "<s>"}
    config |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), "</s>")
    assert_same(*load_both(write_vocab_and_merges(tmp_path, config)))


def test_class_defaults_fill_roles_that_no_file_names(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        "byte_fallback",
        {"tokenizer_class": "LlamaTokenizer", "bos_token": None, "eos_token": None},
    )
    ours, oracle = load_both(folder)
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")
    assert ours.special_tokens_map == oracle.special_tokens_map


@pytest.mark.parametrize("kind", ["wordpiece", "byte_level"])
@pytest.mark.parametrize("in_file", [None, True, False])
@pytest.mark.parametrize("in_call", [None, True, False])
def test_clean_up_of_spaces(
    tmp_path: Path, kind: str, in_file: bool | None, in_call: bool | None
) -> None:
    folder = write_folder(tmp_path, kind, {"clean_up_tokenization_spaces": in_file})
    ours, oracle = load_both(folder)
    ids = oracle.encode("it is , n't ' s . well ! 've , 're ?")
    assert ours.decode(ids, clean_up_tokenization_spaces=in_call) == oracle.decode(
        ids, clean_up_tokenization_spaces=in_call
    )


TRUNCATIONS: list[dict[str, Any]] = [
    {"max_length": 5},
    {"max_length": 5, "truncation": True},
    {"max_length": 5, "truncation": False},
    {"max_length": 5, "truncation": "only_first"},
    {"max_length": 5, "truncation": "do_not_truncate"},
    {"truncation": True},
    {"max_length": 1000, "truncation": True},
    {"max_length": 3, "truncation": True, "add_special_tokens": False},
]


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation(tmp_path: Path, options: dict[str, Any], side: str) -> None:
    config = {"truncation_side": side, "model_max_length": 7}
    ours, oracle = load_both(write_folder(tmp_path, "wordpiece", config))
    text = "the quick brown fox jumps over the lazy dog"
    expected = oracle(text, **options)
    got = ours(text, **options)
    assert got["input_ids"] == expected["input_ids"]
    assert got["attention_mask"] == expected["attention_mask"]
    assert ours.encode(text) == oracle.encode(text)  # nothing stays set


def test_a_truncation_stored_in_tokenizer_json_shortens_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte_level")
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=32)
    library.save(str(folder / "tokenizer.json"))
    ours, oracle = load_both(folder)
    assert ours.encode("hello world " * 9) == oracle.encode("hello world " * 9)
    assert len(ours.encode("hello world " * 19)) > 32


def test_call_gives_lists_and_attributes(tmp_path: Path) -> None:
    ours, oracle = load_both(write_folder(tmp_path, "byte_fallback"))
    texts = ["hello", "hello world and more"]
    assert ours(texts)["input_ids"] == oracle(texts)["input_ids"]
    assert ours("hello").input_ids == oracle("hello").input_ids
    with pytest.raises(AttributeError):
        _ = ours("hello").offsets


def test_names_of_the_hugging_face_object(tmp_path: Path) -> None:
    ours, oracle = load_both(write_folder(tmp_path, "byte_fallback", {"unk_token": "<unk>"}))
    ids = oracle.encode("hello 😀")
    assert ours.convert_ids_to_tokens(ids) == oracle.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == (
        oracle.convert_ids_to_tokens(ids, skip_special_tokens=True)
    )
    tokens = [*oracle.convert_ids_to_tokens(ids), "no such token"]
    assert ours.convert_tokens_to_ids(tokens) == oracle.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_string(tokens) == oracle.convert_tokens_to_string(tokens)
    assert ours.tokenize("hello") == oracle.tokenize("hello")
    assert ours.batch_decode([ids, ids[:2]]) == oracle.batch_decode([ids, ids[:2]])
    assert ours.decode(ids[1]) == oracle.decode(ids[1])
    assert ours.is_fast and oracle.is_fast
    assert ours.num_special_tokens_to_add() == oracle.num_special_tokens_to_add()
    assert ours.max_token_id == ours.vocab_size - 1
    assert ours.convert_ids_to_tokens(10**6) is None


def test_decode_takes_arrays_and_drops_ids_that_cannot_be(tmp_path: Path) -> None:
    import numpy

    ours = Tokenizer.from_folder(write_folder(tmp_path))
    ids = ours.encode("hello world")
    assert ours.decode(numpy.array(ids)) == "hello world"
    assert ours.decode([*ids, -1, 10**6, 2**40]) == "hello world"
    assert ours.decode({"input_ids": ids}) == "hello world"  # type: ignore[arg-type]


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write_folder(tmp_path, "wordpiece"))
    with pytest.raises(UnknownParameter, match="'return_tensors' is not a parameter here"):
        ours.encode("a", return_tensors="pt")
    with pytest.raises(UnknownParameter, match="'pading'"):
        ours("a", pading=True, return_tensors="pt")
    with pytest.raises(UnknownParameter, match="'skip_special'"):
        ours.decode([1], skip_special=True)
    with pytest.raises(InvalidParameter, match="truncation='longest'"):
        ours.encode("a", truncation="longest", max_length=3)
    with pytest.raises(InvalidType, match="max_length='3'"):
        ours.encode("a", max_length="3")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="max_length=1 .*special tokens"):
        ours.encode("a", max_length=1)
    with pytest.raises(InvalidType, match="text=5"):
        ours.encode(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="ids='abc'"):
        ours.decode("abc")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="lone surrogate"):
        ours.encode("a\ud800b")
    with pytest.raises(InvalidParameter, match="tokenizer_mode='slow'"):
        Tokenizer.from_folder(tmp_path, mode="slow")
    assert Tokenizer.from_folder(tmp_path, mode="hf").encode("the") == ours.encode("the")


def test_what_only_transformers_tokenizers_do_is_theirs(tmp_path: Path) -> None:
    """Programs pad, ask for tensors and write files; what they set holds for both."""
    ours, theirs = load_both(
        write_folder(tmp_path, config={"chat_template": "{{ messages[0].content }}"})
    )
    texts = ["hello world", "a"]
    ours.pad_token = theirs.pad_token = theirs.eos_token
    ours.padding_side = theirs.padding_side = "left"
    found = ours(texts, padding=True, return_tensors="pt")
    assert found["input_ids"].equal(theirs(texts, padding=True, return_tensors="pt")["input_ids"])
    assert found["attention_mask"][1].tolist()[0] == 0, "on the left"
    cut = ours(texts, max_length=2, return_offsets_mapping=True)
    assert cut == theirs(texts, max_length=2, truncation=True, return_offsets_mapping=True)
    left = {"max_length": 2, "truncation_side": "left"}
    assert ours("a b c", padding=True, **left)["input_ids"] == ours.encode("a b c", **left)
    assert ours("a b c", padding=True, max_length=2)["input_ids"] != ours.encode("a b c", **left)
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = ours.apply_chat_template(chats, padding=True, return_tensors="pt")
    wanted = theirs(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    assert rendered.equal(wanted["input_ids"])
    assert ours.apply_chat_template(chats, tokenize=False) == texts
    assert ours.save_pretrained(tmp_path / "copy") and (tmp_path / "copy/tokenizer.json").exists()
    ours.pad_token_id = ours.convert_tokens_to_ids("a")
    assert (
        ours.pad_token == "a" and ours(texts, padding=True)["input_ids"][1][0] == ours.pad_token_id
    )
    with pytest.raises(InvalidParameter, match="pad_token='no such token'"):
        ours.pad_token = "no such token"
    with pytest.raises(AttributeError, match="Tokenizer has no 'no_such_name', and"):
        _ = ours.no_such_name
    assert Tokenizer.from_folder(tmp_path).pad_token == load_both(tmp_path)[1].pad_token


def test_without_transformers_it_says_what_is_missing(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    ours = Tokenizer.from_folder(write_folder(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AttributeError, match=r"no 'pad', and .*transformers"):
        _ = ours.pad
    with pytest.raises(ImportError, match="transformers"):
        ours("a", padding=True)
    assert ours("a")["input_ids"], "its own part needs nothing"


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [
        ("vocab.txt", "auto", "WordPiece.*save_pretrained"),
        ("tekken.json", "hf", "pass tokenizer_mode='mistral' for its tekken.json"),
    ],
)
def test_other_formats_say_what_to_do(tmp_path: Path, name: str, mode: str, says: str) -> None:
    (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(LoadError, match=says):
        Tokenizer.from_folder(tmp_path, mode=mode)


def break_nothing(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


BROKEN = {
    "empty folder": (break_nothing, "neither tokenizer.json, vocab.json"),
    "no json": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "cannot be read by the tokenizers library",
    ),
    "config no json": (
        lambda folder: (folder / "tokenizer_config.json").write_text("{,}"),
        "tokenizer_config.json cannot be read as JSON",
    ),
    "config a list": (
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        "must hold a JSON object",
    ),
    "wrong id": (
        lambda folder: write_json(
            folder / "tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<x>"}}}
        ),
        "declared with id 9999",
    ),
    "token without content": (
        lambda folder: write_json(folder / "tokenizer_config.json", {"eos_token": {"text": "x"}}),
        "text or an object with 'content'",
    ),
    "side": (
        lambda folder: write_json(folder / "tokenizer_config.json", {"truncation_side": "up"}),
        "truncation_side='up'",
    ),
    "template": (
        lambda folder: write_json(folder / "tokenizer_config.json", {"chat_template": [1]}),
        "chat_template is a list",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_one_clear_load_error(tmp_path: Path, case: str) -> None:
    write_folder(tmp_path)
    damage, says = BROKEN[case]
    damage(tmp_path)
    with pytest.raises(LoadError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_no_folder_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("vocab", "merges", "says"),
    [
        ('{"a": 0}', "", "not a byte-level vocabulary"),
        ("{", "", "not a BPE model"),
        ('{"a": 0}', "a b c\n", "not a BPE model"),
        ('{"a": 0}', "a b\n", "not a BPE model"),
    ],
)
def test_broken_vocab_and_merges(tmp_path: Path, vocab: str, merges: str, says: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(LoadError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_a_vocabulary_may_lack_bytes_that_no_text_has(tmp_path: Path) -> None:
    """As those of GPT-NeoX and MPT do."""
    folder = write_vocab_and_merges(tmp_path, {"tokenizer_class": "GPTNeoXTokenizer"})
    vocab = json.loads((folder / "vocab.json").read_text())
    never = [chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    assert all(character in vocab for character in never)
    kept = {token: index for token, index in vocab.items() if token not in never}
    write_json(folder / "vocab.json", kept)
    assert Tokenizer.from_folder(folder).encode("a\u00c0") != []
    del kept[chr(0xF4)]
    write_json(folder / "vocab.json", kept)
    with pytest.raises(LoadError, match="1 symbols of bytes are missing"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("prefix", "merge"), [("##", ["a", "b"]), ("x", ["a", "é"]), ("##", "a b")]
)
def test_merges_that_are_shorter_than_the_prefix_do_not_end_the_process(
    tmp_path: Path, prefix: str, merge: Any
) -> None:
    vocab = {text: i for i, text in enumerate(["a", "b", "é", "ab"])}
    model = {"type": "BPE", "vocab": vocab, "merges": [merge], "continuing_subword_prefix": prefix}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    load = (
        "import sys; from pathlib import Path; from quire.text.tokenizer import Tokenizer; "
        "Tokenizer.from_folder(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", load, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("quire.errors.LoadError:") and "does not begin with" in last


def test_vocab_and_merges_of_a_class_with_other_rules_are_refused(tmp_path: Path) -> None:
    write_vocab_and_merges(tmp_path, {"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(LoadError, match="CLIPTokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_code_of_the_repository_is_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]},
        "tokenizer_class": "XTokenizer",
    }
    write_folder(tmp_path / "model", config=config)
    (tmp_path / "model" / "tokenization_x.py").write_text(f"open({str(canary)!r}, 'w')")
    with pytest.raises(LoadError, match="never runs such code"):
        Tokenizer.from_folder(tmp_path / "model")
    assert not canary.exists()


def test_token_text_restores_blanks_and_completes_characters(tmp_path: Path) -> None:
    for kind in ("byte_fallback", "gemma_like", "unigram"):
        metaspace = Tokenizer.from_folder(write_folder(tmp_path / kind, kind))
        blanks = {t: i for t, i in metaspace.get_vocab().items() if t.startswith("▁")}
        assert len(blanks) >= 3
        for token, index in blanks.items():
            assert metaspace.token_text(index) == token.replace("▁", " ")
    plain = Tokenizer.from_folder(write_folder(tmp_path / "b", "byte_level"))
    emoji = plain.encode("🙃")
    assert len(emoji) > 1
    assert plain.token_text(emoji[0]) == ""
    assert plain.token_text(emoji[-1]) == ""
    assert plain.token_text(emoji[-1], [*plain.encode("hello"), *emoji[:-1]]) == "🙃"
    assert plain.token_text(plain.bos_token_id or 0) == "<s>"
    assert plain.token_text(10**6) == ""
    assert plain.token_text(-1) == ""


KEYS = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "eos_token",
    "image_token",
    "tokenizer_class",
    "auto_map",
    "chat_template",
    "truncation_side",
    "model_max_length",
    "add_bos_token",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
)
JUNK: list[Any] = [None, 5, 1.5, True, "x", "", [], [5], ["x", None], {}, {"a": 5}, {"content": 5}]
JUNK += [{"0": "x"}, {"content": "y", "colour": 1}, [[]], [{"name": "n", "template": 5}]]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_any_value_of_a_key_loads_or_is_a_load_error(tmp_path: Path, key: str, file: str) -> None:
    write_folder(tmp_path)
    for value in JUNK:
        write_json(tmp_path / file, {key: value})
        try:
            tokenizer = Tokenizer.from_folder(tmp_path)
        except LoadError as error:
            assert len(str(error)) > 20
        else:
            assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
