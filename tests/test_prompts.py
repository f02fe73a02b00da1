"""Prompts of every form, and what is none."""

import pytest

from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, UnknownParameter
from quire.prompts import (
    GivenMedia,
    ParsedPrompt,
    TextPrompt,
    TokensPrompt,
    as_prompts,
    parse_prompt,
)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ParsedPrompt("hi", None)),
        ("", ParsedPrompt("", None)),
        ([1, 2], ParsedPrompt(None, [1, 2])),
        ((1, 2), ParsedPrompt(None, [1, 2])),
        (TextPrompt(prompt="hi"), ParsedPrompt("hi", None)),
        (TextPrompt(prompt="hi", cache_salt="s"), ParsedPrompt("hi", None, "s")),
        (TokensPrompt(prompt_token_ids=[3]), ParsedPrompt(None, [3])),
        (TokensPrompt(prompt_token_ids=[3], prompt="x"), ParsedPrompt("x", [3])),
        ({"prompt": "hi", "multi_modal_data": None}, ParsedPrompt("hi", None)),
        ({"prompt": "hi", "mm_processor_kwargs": {}}, ParsedPrompt("hi", None)),
        (
            {"prompt": "hi", "multi_modal_data": {"image": 1}, "multi_modal_uuids": {"image": "a"}},
            ParsedPrompt("hi", None, media=GivenMedia({"image": 1}, {"image": "a"}, {}, {})),
        ),
    ],
    ids=str,
)
def test_forms(prompt, parsed):
    assert parse_prompt(prompt) == parsed


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        (
            5,
            InvalidType,
            "prompt=5 is not allowed: it must be a str, a list of token ids, a TextPrompt or "
            "a TokensPrompt.",
        ),
        (["a"], InvalidType, "prompt='a' is not allowed: each token id must be an int."),
        ([1, True], InvalidType, "prompt=True is not allowed: each token id must be an int."),
        ([1.0], InvalidType, "prompt=1.0 is not allowed: each token id must be an int."),
        (
            {},
            InvalidParameter,
            "prompt={} is not allowed: a prompt needs the key prompt, prompt_token_ids or "
            "prompt_embeds.",
        ),
        ({"prompt": 3}, InvalidType, "prompt=3 is not allowed: it must be a str."),
        (
            {"prompt_token_ids": "ab"},
            InvalidType,
            "prompt_token_ids='ab' is not allowed: it must be a list of token ids.",
        ),
        (
            {"prompt": "a", "salt": 1},
            UnknownParameter,
            "'salt' is not a parameter here: a prompt has prompt, prompt_token_ids, cache_salt, "
            "token_type_ids.",
        ),
        (
            {"prompt": "a", "cache_salt": ""},
            InvalidParameter,
            "cache_salt='' is not allowed: it must have from 1 to 1024 characters.",
        ),
        (
            {"prompt": "a", "cache_salt": 3},
            InvalidType,
            "cache_salt=3 is not allowed: it must be a str.",
        ),
        (
            {"prompt": "a", "multi_modal_data": 1},
            InvalidType,
            "multi_modal_data=1 is not allowed: it must be a dict by modality.",
        ),
        (
            {"prompt": "a", "media_io_kwargs": [1]},
            InvalidType,
            "media_io_kwargs=[1] is not allowed: it must be a dict by modality.",
        ),
        (
            {"prompt_token_ids": [5, 6], "token_type_ids": [0]},
            InvalidParameter,
            "token_type_ids=[0] is not allowed: there must be one for each of prompt_token_ids.",
        ),
        (
            {"prompt": "a", "token_type_ids": [0]},
            InvalidParameter,
            "token_type_ids=[0] is not allowed: there must be one for each of prompt_token_ids.",
        ),
        (
            {"prompt_token_ids": [5, 6], "token_type_ids": [1, 0]},
            InvalidParameter,
            "token_type_ids=[1, 0] is not allowed: each 0 must come before each 1.",
        ),
        (
            {"prompt_token_ids": [5], "token_type_ids": [2]},
            InvalidParameter,
            "token_type_ids=2 is not allowed: it must be a list of 0 and 1.",
        ),
        (
            {"prompt_token_ids": [5], "token_type_ids": "0"},
            InvalidType,
            "token_type_ids='0' is not allowed: it must be a list of 0 and 1.",
        ),
        (
            {"prompt_embeds": [1], "prompt_token_ids": [1]},
            InvalidParameter,
            "prompt_token_ids=[1] is not allowed: with prompt_embeds, prompt_token_ids and "
            "prompt_is_token_ids go together.",
        ),
        (
            {"prompt": "a", "prompt_is_token_ids": [True]},
            InvalidParameter,
            "prompt_is_token_ids=[True] is not allowed: it goes with prompt_embeds only.",
        ),
        (
            {"encoder_prompt": "a"},
            NotBuiltYet,
            "encoder_prompt='a' is not allowed: this release does not implement it. "
            "Encoder-decoder models are not served.",
        ),
        (
            "a\ud800",
            InvalidParameter,
            "prompt=\"'a\\\\ud800'\" is not allowed: it must be valid Unicode without lone "
            "surrogates.",
        ),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_anything_but_a_prompt_is_refused(prompt, error, text):
    with pytest.raises(error) as caught:
        parse_prompt(prompt)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("prompts", "number"),
    [
        ("hi", 1),
        ([1, 2, 3], 1),
        ({"prompt": "hi"}, 1),
        ([], 0),
        (["a", "b"], 2),
        ([[1, 2], [3]], 2),
        (["a", [1], {"prompt": "x"}], 3),
        (("a", "b"), 2),
    ],
    ids=str,
)
def test_one_or_several(prompts, number):
    assert len(as_prompts(prompts)) == number


def test_a_number_is_not_a_list_of_prompts():
    with pytest.raises(InvalidType) as caught:
        as_prompts(7)
    assert (
        str(caught.value) == "prompts=7 is not allowed: it must be a prompt or a list of prompts."
    )
