"""How much of a text one token can stand for, and which expressions may not end."""

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

from quire.text.text_bounds import longest_token_bytes, repeats_a_choice
from quire.text.tokenizer import Tokenizer
from tests.text import tokenizer_folders
from tests.text.tokenizer_folders import CORPUS, write_folder

BOUNDED = ("byte_level", "byte_fallback", "gemma_like")
TEXTS = [*CORPUS, " " * 99, "\u212a\u212b\U0001d400" * 9, "\ud7ff\x00\n", "e\u0301" * 9]


@pytest.mark.parametrize("kind", tokenizer_folders.CLASSES)
def test_no_token_covers_more_than_the_bound(tmp_path, kind):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, kind))
    bound = tokenizer.longest_token_bytes
    assert (bound is not None) == (kind in BOUNDED)
    for text in TEXTS if bound else ():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) * bound >= len(text.encode()), text


def test_normal_forms_are_allowed_for():
    library = tokenizer_folders.byte_level()
    plain = longest_token_bytes(library)
    library.normalizer = normalizers.NFKC()
    assert longest_token_bytes(library) == 4 * plain


@pytest.mark.parametrize("part", ["strip", "removed", "whitespace", "stripping token", "letters"])
def test_what_may_drop_texts_has_no_bound(part):
    library = tokenizer_folders.byte_level()
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if part == "strip":
        library.normalizer = normalizers.Strip()
    if part == "removed":
        removing = pre_tokenizers.Split(" ", "removed")
        library.pre_tokenizer = pre_tokenizers.Sequence([removing, cut])
    if part == "whitespace":
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), cut])
    if part == "stripping token":
        library.add_special_tokens([AddedToken("<x>", rstrip=True)])
    if part == "letters":
        library.pre_tokenizer = pre_tokenizers.Metaspace()
    assert longest_token_bytes(library) is None


@pytest.mark.parametrize(
    ("expression", "repeats"),
    [
        (r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", False),
        (r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)", False),
        (r"[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|[!(*+)|]+[a-z]*", False),
        (r"(a+)*", True),
        (r"(?:a|aa)+b", True),
        (r"(\d+,?){2,}", True),
    ],
)
def test_expressions_that_repeat_a_choice_are_known(expression, repeats):
    assert repeats_a_choice(expression) is repeats
