"""The incremental detokenizer: chunking, whole decoding, incomplete and invalid bytes."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from quire.text.detokenizer import MAX_HELD_IDS, IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import TokenizerFacts
from tests.text.tokenizer_folders import tokenizer_json

TABLES = ("byte_level", "byte_fallback", "gemma_like", "unigram", "wordpiece", "no_decoder")
ALL = (*TABLES, "bpe_with_suffix", "odd_sequence")
TEXTS = [
    "hello world",
    "Größe 😀 ok",
    "👩‍👩‍👧🇩🇪",
    "你好,世界。\n",
    " a  b ",
    "isn't <s> it </s>",
    "½…—",
]


@cache
def tokenizer(kind: str) -> Tokenizer:
    facts = TokenizerFacts(
        {"bos_token": "<s>", "eos_token": "</s>"}, (), None, False, "right", None
    )
    library = Library.from_str(tokenizer_json(kind))
    library.add_tokens(["<plain>", "<tool>"])
    return Tokenizer(library, facts)


def stream(kind: str, prompt: list[int], ids: list[int], cuts: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer(kind), prompt, skip_special_tokens=skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return "".join(detokenizer.feed(ids[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True))


def one_by_one(
    kind: str, ids: list[int], prompt: list[int] | None = None, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer(kind), prompt or [], skip_special_tokens=skip)
    return [detokenizer.feed([index]) for index in ids]


def any_ids(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokenizer(kind).vocab_size
    return st.lists(st.integers(min_value=-2, max_value=size + 2), max_size=24)


def text_ids(kind: str) -> st.SearchStrategy[list[int]]:
    texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
    if kind == "odd_sequence":  # the library's stream takes a U+FFFD of the text for open bytes
        texts = texts.map(lambda text: text.replace("\ufffd", "?"))
    return texts.map(lambda text: tokenizer(kind).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", ALL)
def test_the_text_does_not_depend_on_how_the_ids_are_cut(kind: str) -> None:
    @settings(max_examples=80, deadline=None)
    @given(any_ids(kind), any_ids(kind), st.lists(st.integers(0, 24)), st.booleans())
    def check(prompt: list[int], ids: list[int], cuts: list[int], skip: bool) -> None:
        whole = stream(kind, prompt, ids, [], skip)
        assert stream(kind, prompt, ids, cuts, skip) == whole
        assert "".join(one_by_one(kind, ids, prompt, skip)) == whole

    check()


@pytest.mark.parametrize("kind", ALL)
def test_valid_text_is_what_the_library_decodes(kind: str) -> None:
    @settings(max_examples=80, deadline=None)
    @given(text_ids(kind), text_ids(kind), st.lists(st.integers(0, 24)), st.booleans())
    def check(prompt: list[int], ids: list[int], cuts: list[int], skip: bool) -> None:
        library = tokenizer(kind).library
        before = library.decode(prompt, skip_special_tokens=skip)
        both = library.decode(prompt + ids, skip_special_tokens=skip)
        if not both.startswith(before):  # a decoder that looks ahead rewrites the prompt's end
            assert kind == "bpe_with_suffix"
            return
        assert stream(kind, prompt, ids, cuts, skip) == both[len(before) :]

    check()


@pytest.mark.parametrize("skip", [True, False], ids=["skip special", "keep special"])
@pytest.mark.parametrize("kind", ["byte_level", "unigram", "wordpiece", "no_decoder"])
def test_any_ids_are_what_the_library_decodes_less_an_open_end(kind: str, skip: bool) -> None:
    @settings(max_examples=120, deadline=None)
    @given(any_ids(kind))
    def check(ids: list[int]) -> None:
        valid = [index for index in ids if index >= 0]
        expected = tokenizer(kind).library.decode(valid, skip_special_tokens=skip)
        got = stream(kind, [], ids, [], skip)
        assert expected.startswith(got)
        assert expected[len(got) :] in ("", "\ufffd")

    check()


@pytest.mark.parametrize("kind", ["byte_fallback", "gemma_like"])
def test_runs_of_bytes_decode_as_the_library_does_unless_one_spoils_earlier_characters(
    kind: str,
) -> None:
    first = tokenizer(kind).convert_tokens_to_ids("<0x00>")
    byte_runs = st.lists(st.integers(first, first + 255), max_size=6)
    words = st.sampled_from(tokenizer(kind).encode("hello the", add_special_tokens=False))

    def agrees(run: list[int]) -> bool:
        """Valid as a whole, or invalid before it gave a character."""
        data = bytes(index - first for index in run)
        try:
            data.decode()
        except UnicodeDecodeError as error:
            return error.start == 0
        return True

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.tuples(byte_runs.filter(agrees), words), max_size=4))
    def check(runs: list[tuple[list[int], int]]) -> None:
        ids = [index for run, word in runs for index in [*run, word]]
        expected = tokenizer(kind).library.decode(ids, skip_special_tokens=True)
        assert stream(kind, [], ids, [], True) == expected

    check()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like", "odd_sequence"])
def test_an_emoji_of_several_ids_comes_at_once(kind: str) -> None:
    ids = tokenizer(kind).encode("🙃", add_special_tokens=False)
    texts = one_by_one(kind, ids, prompt=tokenizer(kind).encode("hello"))
    assert len(ids) >= 3
    assert [text for text in texts if text.strip()] == ["🙃"]
    assert texts[-1] == "🙃"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like", "odd_sequence"])
def test_incomplete_bytes_at_the_end_give_nothing(kind: str) -> None:
    ids = tokenizer(kind).encode("hello🙃", add_special_tokens=False)
    for end in (1, 2):
        assert "".join(one_by_one(kind, ids[:-end], skip=True)) == "hello"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like", "odd_sequence"])
@pytest.mark.parametrize("byte", [0x80, 0xFF, 0xC0, 0xF5])
def test_invalid_bytes_cannot_stall_the_stream(kind: str, byte: int) -> None:
    token = f"<0x{byte:02X}>" if kind != "byte_level" else byte_level_letter(byte)
    index = tokenizer(kind).convert_tokens_to_ids(token)
    texts = one_by_one(kind, [index] * 200)
    shown, held = 0, 0
    for text in texts:
        held = 0 if text else held + 1
        shown += len(text)
        assert held <= (MAX_HELD_IDS if kind == "odd_sequence" else 3)
    assert set("".join(texts)) == {"\ufffd"}
    assert shown >= 200 - MAX_HELD_IDS - 1


def byte_level_letter(byte: int) -> str:
    from tokenizers import pre_tokenizers

    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for number in range(0x80, 0x110000):
        try:
            data = chr(number).encode()
        except UnicodeEncodeError:
            continue
        if byte in data:
            return pre.pre_tokenize_str(chr(number))[0][0][data.index(byte)]
    others = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert byte in others
    return chr(byte)  # printable Latin-1 stands for itself


def test_half_a_surrogate_is_invalid_at_once() -> None:
    """Python's decoder waits for the other half (ED A0 ...), which UTF-8 does not have."""
    ids = tokenizer("byte_level").convert_tokens_to_ids(
        [byte_level_letter(0xED), byte_level_letter(0xA0)]
    )
    assert tokenizer("byte_level").decode(ids) == "\ufffd\ufffd"
    assert one_by_one("byte_level", ids) == ["", "\ufffd\ufffd"]


def test_the_prompts_open_character_is_completed() -> None:
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizer(kind).encode("hello 🙃", add_special_tokens=False)
        for end in (1, 2):
            assert "".join(one_by_one(kind, ids[-end:], prompt=ids[:-end])) == "🙃"


def test_a_leading_blank_depends_on_the_prompt() -> None:
    hello = tokenizer("byte_fallback").encode("hello", add_special_tokens=False)
    bos = tokenizer("byte_fallback").convert_tokens_to_ids("<s>")
    for prompt, skip, text in [
        ([], True, "hello"),
        ([bos], True, "hello"),
        ([bos], False, " hello"),
        (hello, True, " hello"),
    ]:
        assert "".join(one_by_one("byte_fallback", hello, prompt, skip)) == text


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = tokenizer("byte_level").encode("hello</s><plain>")
    assert "".join(one_by_one("byte_level", ids)) == "hello<plain>"
    assert "".join(one_by_one("byte_level", ids, skip=False)) == "hello</s><plain>"


def test_blanks_between_added_tokens_can_be_left_out() -> None:
    source = tokenizer("no_decoder")
    ids = source.convert_tokens_to_ids(["hello", "<plain>", "<tool>", "</s>", "hello"])
    texts = {}
    for between in (True, False):
        detokenizer = IncrementalDetokenizer(
            source, [], skip_special_tokens=False, spaces_between_special_tokens=between
        )
        texts[between] = "".join(detokenizer.feed([index]) for index in ids)
    assert texts[True] == "hello <plain> <tool> </s> hello"
    assert texts[False] == "hello <plain><tool></s> hello"


@pytest.mark.parametrize("kind", ALL)
def test_ids_outside_the_vocabulary_give_nothing(kind: str) -> None:
    hello = tokenizer(kind).encode("hello", add_special_tokens=False)
    wrong = [-1, tokenizer(kind).vocab_size, 2**31, 2**40]
    texts = one_by_one(kind, [*wrong, *hello, *wrong])
    assert texts[:4] == texts[-4:] == [""] * 4
    assert "".join(texts) == "hello"
    assert all(len(source) <= len(tokenizer(kind)) for source in tables(kind))


def tables(kind: str) -> list[dict[int, object]]:
    pieces = tokenizer(kind).pieces
    return [*pieces.tables.values(), *pieces.first_tables.values()]


def test_two_requests_do_not_meet() -> None:
    emoji = tokenizer("byte_level").encode("🙃", add_special_tokens=False)
    one, two = (IncrementalDetokenizer(tokenizer("byte_level"), []) for _ in range(2))
    assert one.feed(emoji[:-1]) == ""
    assert two.feed(emoji) == "🙃"
    assert one.feed(emoji[-1:]) == "🙃"
