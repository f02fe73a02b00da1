"""The forms in which a prompt can be given, and what every form comes down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypeAlias

from typing_extensions import TypedDict  # pydantic takes no other below Python 3.12

from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, UnknownParameter
from quire.params import checks

MAX_CACHE_SALT_CHARS = 1024


class _PromptOptions(TypedDict):
    cache_salt: NotRequired[str | None]
    """Prompts share cached blocks only with those of the same salt."""
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    media_io_kwargs: NotRequired[Mapping[str, Any] | None]


class TextPrompt(_PromptOptions):
    """A prompt as text, which the tokenizer turns into tokens."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids; `prompt` is the text to report with it, `token_type_ids` are 0 for the
    tokens of its first text and 1 for those of its second.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    token_type_ids: NotRequired[list[int] | None]
    prompt_token_offsets: NotRequired[list[tuple[int, int]] | None]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings [tokens, hidden size] (or [1, tokens, hidden size]), as the model's
    own table has them for ids; needs `enable_prompt_embeds`. `prompt` is the text to report with
    it. Where `prompt_is_token_ids` is True, the embedding of `prompt_token_ids` stands in place of
    the row; both are as long as the prompt.
    """

    prompt_embeds: Any
    prompt: NotRequired[str | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_is_token_ids: NotRequired[list[bool] | None]
    cache_salt: NotRequired[str | None]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
"""One prompt, in any of its forms."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "token_type_ids")
_EMBEDS_KEYS = ("prompt_embeds", "prompt_is_token_ids")
_MEDIA_KEYS = (
    *("multi_modal_data", "multi_modal_uuids"),
    *("mm_processor_kwargs", "media_io_kwargs"),
)
_RENDERED = {"type": ("token", "embeds")}
"""Keys of prompts that were rendered before -> those values that are token ids or embeddings."""
_UNBUILT = {
    "prompt_token_offsets": "Leave it out.",
    "encoder_prompt": "Encoder-decoder models are not served.",
    "decoder_prompt": "Encoder-decoder models are not served.",
    "data": "Give prompt or prompt_token_ids.",
}


class GivenMedia(NamedTuple):
    """Media at a prompt's placeholders: by modality an item or a list of them, their ids as
    the caller names them, and changes to how they are processed and decoded.
    """

    data: Mapping[str, Any]
    uuids: Mapping[str, Any]
    processor_kwargs: Mapping[str, Any]
    io_kwargs: Mapping[str, Any]


class GivenEmbeds(NamedTuple):
    """Embeddings of tokens, unchecked. `is_id`: where the ids count instead; None: nowhere."""

    rows: Any
    is_id: Sequence[bool] | None


class ParsedPrompt(NamedTuple):
    """One prompt in its plain form: text, or token ids (then the text is only for show), each of
    which may have a type, or embeddings; and media.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    token_types: list[int] | None = None
    media: GivenMedia | None = None
    embeds: GivenEmbeds | None = None


@dataclass(frozen=True, slots=True)
class BegunPrompt:
    """A prompt and the output that it already has, after which a request goes on: limits, grammars
    and penalties count that as output. The steps of a beam search are such requests.
    """

    prompt: Any
    output_token_ids: list[int]


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Read one prompt of any form.

    Raises InvalidType for what is not a prompt, UnknownParameter for a key that does not exist,
    NotBuiltYet for forms that are not implemented. Token ids are checked to be ints here, and
    against the vocabulary later.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(checks.text("prompt", prompt), None)
    prompt = plain_ids(prompt)
    if isinstance(prompt, (list, tuple)):
        return ParsedPrompt(None, _token_ids("prompt", prompt))
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    allowed = "it must be a str, a list of token ids, a TextPrompt or a TokensPrompt"
    raise InvalidType("prompt", prompt, allowed)


def has_media(prompt: object) -> bool:
    """Whether a prompt comes with media, or with ids that stand for some."""
    return isinstance(prompt, Mapping) and any(map(prompt.get, _MEDIA_KEYS[:2]))


def with_processor_kwargs(prompt: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """The prompt with `mm_processor_kwargs`, over which its own rule; without media as it is."""
    if not kwargs or not has_media(prompt):
        return prompt
    return {**prompt, "mm_processor_kwargs": {**kwargs, **(prompt.get(_MEDIA_KEYS[2]) or {})}}


def as_prompts(prompts: object) -> list[Any]:
    """The prompts in `prompts`, which may be one prompt or a sequence of them; [] has none."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = plain_ids(prompts)
    if not isinstance(prompts, Sequence):
        allowed = "it must be a prompt or a list of prompts"
        raise InvalidType("prompts", prompts, allowed)
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def plain_ids(value: object) -> object:
    """The list of an array of integers of any library (numpy, torch, array); all else as it is. Of
    an array with two axes, one list for each row.
    """
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def _parse_dict(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key, value in prompt.items():
        if key in _UNBUILT:
            if value is not None and value != {}:
                raise NotBuiltYet(key, value, _UNBUILT[key])
        elif key not in (*_KEYS, *_MEDIA_KEYS, *_EMBEDS_KEYS) and (
            value not in _RENDERED.get(key, ())
        ):
            raise UnknownParameter(str(key), f"a prompt has {', '.join(_KEYS)}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    has_embeds = prompt.get("prompt_embeds") is not None
    if text is None and token_ids is None and not has_embeds:
        allowed = "a prompt needs the key prompt, prompt_token_ids or prompt_embeds"
        raise InvalidParameter("prompt", dict(prompt), allowed)
    if text is not None:
        checks.text("prompt", text)
    if token_ids is not None:
        token_ids = _token_ids("prompt_token_ids", token_ids)
    types = _token_types(prompt.get("token_type_ids"), token_ids)
    salt = _cache_salt(prompt.get("cache_salt"))
    media = _media(prompt)
    embeds = _embeds(prompt, token_ids, types, media)
    return ParsedPrompt(text, token_ids, salt, types, media, embeds)


def _embeds(
    prompt: Mapping[str, Any],
    token_ids: list[int] | None,
    types: list[int] | None,
    media: GivenMedia | None,
) -> GivenEmbeds | None:
    """The prompt's embeddings, or None. Raises InvalidParameter for what does not go with them."""
    rows, is_id = (prompt.get(key) for key in _EMBEDS_KEYS)
    if rows is None:
        if is_id is not None:
            raise InvalidParameter(_EMBEDS_KEYS[1], is_id, "it goes with prompt_embeds only")
        return None
    if media is not None or types is not None:
        key = "token_type_ids" if media is None else "multi_modal_data"
        raise InvalidParameter(key, prompt.get(key), "it does not go with prompt_embeds")
    if (is_id is None) != (token_ids is None):
        allowed = "with prompt_embeds, prompt_token_ids and prompt_is_token_ids go together"
        raise InvalidParameter("prompt_token_ids", token_ids, allowed)
    if is_id is None:
        return GivenEmbeds(rows, None)
    is_id = plain_ids(is_id)
    if not isinstance(is_id, list | tuple) or not all(type(one) is bool for one in is_id):
        raise InvalidType(_EMBEDS_KEYS[1], is_id, "it must be a list of True and False")
    if token_ids is None or len(is_id) != len(token_ids):
        allowed = "there must be one for each of prompt_token_ids"
        raise InvalidParameter(_EMBEDS_KEYS[1], is_id, allowed)
    return GivenEmbeds(rows, is_id)


def _media(prompt: Mapping[str, Any]) -> GivenMedia | None:
    """The prompt's media; None where it has none."""
    found = []
    for key in _MEDIA_KEYS:
        value = prompt.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise InvalidType(key, value, "it must be a dict by modality")
        found.append({} if value is None else value)
    media = GivenMedia(*found)
    return media if media.data or media.uuids else None


def _token_types(value: object, token_ids: list[int] | None) -> list[int] | None:
    """Raises InvalidParameter for other types than those of two texts, one after the other."""
    if value is None:
        return None
    name, allowed = "token_type_ids", "it must be a list of 0 and 1"
    if not isinstance(value, (list, tuple)):
        raise InvalidType(name, value, allowed)
    types = [checks.integer(name, one, 0, 1, allowed) for one in value]
    if token_ids is None or len(types) != len(token_ids):
        raise InvalidParameter(name, value, "there must be one for each of prompt_token_ids")
    if sorted(types) != types:
        raise InvalidParameter(name, value, "each 0 must come before each 1")
    return types


def _token_ids(name: str, value: object) -> list[int]:
    value = plain_ids(value)
    if not isinstance(value, (list, tuple)):
        raise InvalidType(name, value, "it must be a list of token ids")
    if {int}.issuperset(map(type, value)):
        return list(value)
    allowed = "each token id must be an int"
    return [checks.integer(name, item, -(2**63), 2**63 - 1, allowed) for item in value]


def _cache_salt(value: object) -> str | None:
    if value is None:
        return None
    salt = checks.text("cache_salt", value)
    if not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        allowed = f"it must have from 1 to {MAX_CACHE_SALT_CHARS} characters"
        raise InvalidParameter("cache_salt", salt, allowed)
    return salt
