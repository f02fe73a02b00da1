"""The special and added tokens of a tokenizer, according to the side files of its folder.

The rules are those of transformers' fast classes (tokenization_utils_base.py, `_from_pretrained`):
`added_tokens_decoder` in tokenizer_config.json makes special_tokens_map.json and added_tokens.json
void; a special token that is not an added token yet becomes one; class defaults fill roles that no
file names, if the vocabulary has their token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from quire.errors import LoadError
from quire.text.json_files import read_json

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END_OF_TEXT = "<|endoftext|>"
CLASS_DEFAULTS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
        "pad_token": "<|padding|>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
CLASS_OF_MODEL_TYPE = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "codegen", "starcoder2"), "GPT2Tokenizer"),
    "gpt_neox": "GPTNeoXTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "llama": "LlamaTokenizer",
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")


def _as_added_token(value: Any, *, special: bool | None = None) -> AddedToken | str:
    """A token as the files write it: text, or an object with its flags."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise LoadError(
            f"A special or added token is written as {value!r}; text or an object with 'content' "
            f"is expected."
        )
    flags = {k: v for k, v in value.items() if k not in ("__type", "id", "content")}
    if special is not None:
        flags["special"] = special
    try:
        return AddedToken(value["content"], **flags)
    except TypeError as error:
        raise LoadError(
            f"The added token {value!r} has a flag that is not known: {error}."
        ) from error


def declared_added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Id -> added token by tokenizer_config.json or, in older folders, added_tokens.json."""
    if "added_tokens_decoder" in config:
        tokens = {}
        for index, value in _object("added_tokens_decoder", config["added_tokens_decoder"]).items():
            token = _as_added_token(value)
            tokens[_id(index)] = AddedToken(token) if isinstance(token, str) else token
        return tokens
    # in place: the roles are collected from `config` afterwards
    config.update(_legacy_special_tokens(folder))
    special = {_text_of(config[role]) for role in ROLES if config.get(role)}
    special |= {_text_of(token) for token in _extra_list(config)}
    return {
        _id(index): AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in read_json(folder / "added_tokens.json").items()
    }


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LoadError(f"{name} must be an object in the tokenizer's files, but it is {value!r}.")
    return value


def _id(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise LoadError(f"An added token is declared with {value!r} for its id.") from error


def _legacy_special_tokens(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json, which rules where tokenizer_config.json has no added tokens."""
    return {
        key: value
        for key, value in read_json(folder / "special_tokens_map.json").items()
        if key in ROLES or key in ("additional_special_tokens", "extra_special_tokens")
    }


def _text_of(value: Any) -> str:
    return _content(_as_added_token(value))


def _extra_list(config: dict[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise LoadError(f"The extra special tokens must be a list or an object, not {extra!r}.")
    return list(extra) if isinstance(extra, list) else []  # an object names roles


def collect_special_tokens(
    config: dict[str, Any],
    class_name: str | None,
    declared: dict[int, AddedToken],
    library: LibraryTokenizer,
) -> tuple[dict[str, AddedToken | str], list[AddedToken | str]]:
    """(role -> token, other special tokens): the model's `*_token` keys, and the extra list."""
    by_text: dict[str, AddedToken] = {token.content: token for token in declared.values()}
    if "added_tokens_decoder" not in config:
        by_text.update({t.content: t for t in library.get_added_tokens_decoder().values()})
    defaults = {
        role: text
        for role, text in _class_defaults(class_name, library).items()
        # a role that the file has as null has no token on purpose
        if role not in config and library.token_to_id(text) is not None
    }
    named = {**defaults, **_named_tokens(config)}
    ordered = [role for role in ROLES if role in named]
    ordered += [role for role in named if role not in ROLES]
    roles = {
        role: by_text.get(_text_of(named[role]), _as_added_token(named[role])) for role in ordered
    }
    return roles, [_as_added_token(token, special=True) for token in _extra_list(config)]


def _class_defaults(class_name: str | None, library: LibraryTokenizer) -> dict[str, str]:
    if class_name == "LlamaTokenizer" and "ByteLevel" in repr(library.decoder):
        return {}  # Llama 3 folders name this class, but share nothing with it
    return CLASS_DEFAULTS.get(class_name or "", {})


def _named_tokens(config: dict[str, Any]) -> dict[str, Any]:
    named = {
        key: value
        for key, value in config.items()
        if (key in ROLES and value is not None)
        or (key.endswith("_token") and key not in ROLES and isinstance(value, str))
    }
    extra = config.get("extra_special_tokens")
    return {**named, **extra} if isinstance(extra, dict) else named


def add_missing_tokens(
    library: LibraryTokenizer,
    declared: dict[int, AddedToken],
    special_tokens: dict[str, AddedToken | str],
    extra: list[AddedToken | str],
) -> None:
    """Make every declared and special token an added token, with its declared flags and id."""
    present = library.get_added_tokens_decoder()
    # in the order of ids: the library gives new tokens the next ones
    wanted = [token for index, token in sorted(declared.items()) if present.get(index) != token]
    known = {token.content for token in present.values()} | {token.content for token in wanted}
    for token in [*special_tokens.values(), *extra]:
        if _content(token) not in known:
            known.add(_content(token))
            wanted.append(_as_special(token))
    library.add_tokens(wanted)
    _check_ids(library, declared)


def _content(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else str(token.content)


def _as_special(token: AddedToken | str) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = True
    return token


def _check_ids(library: LibraryTokenizer, declared: dict[int, AddedToken]) -> None:
    for index, token in declared.items():
        got = library.token_to_id(token.content)
        if got != index:
            raise LoadError(
                f"The added token {token.content!r} is declared with id {index}, but the "
                f"vocabulary gives it {got}; "
                f"the tokenizer files do not belong together."
            )
