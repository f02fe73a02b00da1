"""Reads a tokenizer's files: the library's object, and the facts that only the side files know.

The rules are those of transformers' fast classes (`tokenization_utils_base.py`,
`_from_pretrained`): `added_tokens_decoder` in tokenizer_config.json makes special_tokens_map.json
and added_tokens.json void; a special token that is not an added token yet becomes one; class
defaults fill roles that no file names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as LibraryTokenizer

from quire.errors import LoadError
from quire.text.template_files import read_chat_template
from quire.text.vocab_merges import build_from_vocab_and_merges

logger = logging.getLogger(__name__)

ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Above this, model_max_length in the wild means "not known" (transformers writes 1e30).
LARGEST_KNOWN_LENGTH = 10**20

_END_OF_TEXT = "<|endoftext|>"
_CLASS_DEFAULTS = {
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
_CLASS_OF_MODEL_TYPE = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "codegen", "starcoder2"), "GPT2Tokenizer"),
    "gpt_neox": "GPTNeoXTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "llama": "LlamaTokenizer",
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}
_GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What the side files say; `special_tokens` maps a role such as "eos_token" to the token's
    text.
    """

    special_tokens: dict[str, str]
    extra_special_tokens: tuple[str, ...]
    chat_template: str | dict[str, str] | None
    cleans_up_spaces: bool
    truncation_side: str
    model_max_length: int | None


def read_tokenizer_folder(
    folder: Path, *, add_bos_token: bool | None = None, add_eos_token: bool | None = None
) -> tuple[LibraryTokenizer, TokenizerFacts]:
    """Read every tokenizer file of `folder`; raises LoadError with one sentence that says what to
    do.

    `add_bos_token` and `add_eos_token`, when given, rule over the file's post-processor.
    """
    if not folder.is_dir():
        raise LoadError(f"{str(folder)!r} is not a folder, so there is no tokenizer to read in it.")
    config = read_json(folder / "tokenizer_config.json")
    class_name = _class_name(folder, config)
    _refuse_repository_code(folder, config, class_name)
    library = _load_library_tokenizer(folder, config, class_name)
    library.no_truncation()  # a limit stored in the file would shorten prompts silently
    library.no_padding()
    library.encode_special_tokens = bool(config.get("split_special_tokens", False))
    declared = _declared_added_tokens(folder, config)
    special_tokens, extra = _special_tokens(config, class_name, declared, library)
    _add_missing_tokens(library, declared, special_tokens, extra)
    roles = {role: str(token) for role, token in special_tokens.items()}
    _set_bos_and_eos(library, folder, config, roles, add_bos_token, add_eos_token)
    return library, TokenizerFacts(
        special_tokens=roles,
        extra_special_tokens=tuple(str(token) for token in extra),
        chat_template=read_chat_template(folder, config),
        cleans_up_spaces=_cleans_up_spaces(config, library),
        truncation_side=_truncation_side(config),
        model_max_length=_model_max_length(config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} when there is no such file; raises LoadError if it is
    anything else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} must hold a JSON object, but it holds a {type(value).__name__}.")
    return value


def _class_name(folder: Path, config: dict[str, Any]) -> str | None:
    """The transformers class whose defaults count, without "Fast"; None for the classes that have
    none.
    """
    model_config = read_json(folder / "config.json")
    by_model_type = _CLASS_OF_MODEL_TYPE.get(str(model_config.get("model_type")))
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if name is None:
        return by_model_type
    name = str(name).removesuffix("Fast")
    if name in _GENERIC_CLASSES:
        return None if (folder / "tokenizer.json").is_file() else by_model_type
    return name


def _refuse_repository_code(folder: Path, config: dict[str, Any], class_name: str | None) -> None:
    auto_map = config.get("auto_map")
    has_code = isinstance(auto_map, list) or (
        isinstance(auto_map, dict) and "AutoTokenizer" in auto_map
    )
    declared = str(config.get("tokenizer_class")).removesuffix("Fast")
    if has_code and class_name not in _CLASS_DEFAULTS and declared not in _GENERIC_CLASSES:
        raise LoadError(
            f"The tokenizer in {folder} is Python code of its repository (auto_map with "
            f"tokenizer_class "
            f"{declared!r}), and Quire never runs such code. Convert it once with transformers "
            f"(trust_remote_code=True) to a tokenizer.json, or name another folder through "
            f"`tokenizer=`."
        )


def _load_library_tokenizer(
    folder: Path, config: dict[str, Any], class_name: str | None
) -> LibraryTokenizer:
    whole = folder / "tokenizer.json"
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        try:
            return LibraryTokenizer.from_file(str(whole))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise LoadError(
                f"{whole} cannot be read by the tokenizers library: {error}."
            ) from error
    if vocab.is_file() and merges.is_file():
        prefix_space = bool(config.get("add_prefix_space") or False)
        return build_from_vocab_and_merges(vocab, merges, class_name, prefix_space)
    raise LoadError(_what_is_missing(folder))


# File name -> (what it is, what transformers needs beside itself to convert it).
_OTHER_FORMATS = {
    "tekken.json": ("a tekken file", "mistral-common"),
    "tokenizer.model": ("a SentencePiece file", "sentencepiece"),
    "tiktoken.model": ("a tiktoken file", "tiktoken"),
    "vocab.txt": ("a WordPiece word list", "tokenizers"),
}


def _what_is_missing(folder: Path) -> str:
    for name in sorted(path.name for path in folder.iterdir()):
        kind = "tiktoken.model" if name.endswith(".tiktoken") else name
        if kind in _OTHER_FORMATS:
            what, package = _OTHER_FORMATS[kind]
            return (
                f"{folder} has no tokenizer.json, and its {name} is {what}. Install "
                f"transformers and {package} and once run "
                f"`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
            )
    return (
        f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt is "
        f"in it. Name a folder that has one through `tokenizer=`, or pass "
        f"`skip_tokenizer_init=True` and token ids."
    )


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


def _declared_added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Id -> added token as tokenizer_config.json (or, in older folders, added_tokens.json) declares
    them.
    """
    if "added_tokens_decoder" in config:
        tokens = {}
        for index, value in config["added_tokens_decoder"].items():
            token = _as_added_token(value)
            tokens[int(index)] = AddedToken(token) if isinstance(token, str) else token
        return tokens
    config.update(_legacy_special_tokens(folder))
    special = {_text_of(config[role]) for role in ROLES if config.get(role)}
    special |= {_text_of(token) for token in _extra_list(config)}
    return {
        int(index): AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in read_json(folder / "added_tokens.json").items()
    }


def _legacy_special_tokens(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json, which rules over tokenizer_config.json where the latter lists no
    added tokens.
    """
    return {
        key: value
        for key, value in read_json(folder / "special_tokens_map.json").items()
        if key in ROLES or key in ("additional_special_tokens", "extra_special_tokens")
    }


def _text_of(value: Any) -> str:
    return _content(_as_added_token(value))


def _extra_list(config: dict[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return list(extra) if isinstance(extra, list) else []


def _special_tokens(
    config: dict[str, Any],
    class_name: str | None,
    declared: dict[int, AddedToken],
    library: LibraryTokenizer,
) -> tuple[dict[str, AddedToken | str], list[AddedToken | str]]:
    """(role -> token, further special tokens): the named ones, `*_token` keys of the model, and the
    extra list.
    """
    by_text: dict[str, AddedToken] = {token.content: token for token in declared.values()}
    if "added_tokens_decoder" not in config:
        by_text.update({t.content: t for t in library.get_added_tokens_decoder().values()})
    defaults = {
        role: text
        for role, text in _class_defaults(class_name, library).items()
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
    return _CLASS_DEFAULTS.get(class_name or "", {})


def _named_tokens(config: dict[str, Any]) -> dict[str, Any]:
    named = {
        key: value
        for key, value in config.items()
        if (key in ROLES and value is not None)
        or (key.endswith("_token") and key not in ROLES and isinstance(value, str))
    }
    extra = config.get("extra_special_tokens")
    return {**named, **extra} if isinstance(extra, dict) else named


def _add_missing_tokens(
    library: LibraryTokenizer,
    declared: dict[int, AddedToken],
    special_tokens: dict[str, AddedToken | str],
    extra: list[AddedToken | str],
) -> None:
    """Make every declared and special token an added token of the library, with the declared flags
    and ids.
    """
    present = library.get_added_tokens_decoder()
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


def _set_bos_and_eos(
    library: LibraryTokenizer,
    folder: Path,
    config: dict[str, Any],
    roles: dict[str, str],
    add_bos: bool | None,
    add_eos: bool | None,
) -> None:
    """Let flags replace the post-processor: the caller's always, the file's only where no
    tokenizer.json rules.

    transformers (since 5.0) takes tokenizer.json's post-processor for the truth and drops the flags
    of tokenizer_config.json beside it; a disagreement is logged, because older releases went the
    other way.
    """
    in_file = {k: config.get(k) for k in ("add_bos_token", "add_eos_token")}
    if add_bos is None and add_eos is None and (folder / "tokenizer.json").is_file():
        _warn_of_disagreement(library, folder, in_file, roles)
        if library.post_processor is not None:
            return
        in_file = dict.fromkeys(in_file)
    bos = bool(in_file["add_bos_token"] if add_bos is None else add_bos)
    eos = bool(in_file["add_eos_token"] if add_eos is None else add_eos)
    install_bos_and_eos(library, roles, bos, eos)


def install_bos_and_eos(
    library: LibraryTokenizer, roles: dict[str, str], add_bos: bool, add_eos: bool
) -> None:
    """Replace the post-processor by one that adds exactly these; a role without a token adds
    nothing.
    """
    bos = roles.get("bos_token") if add_bos else None
    eos = roles.get("eos_token") if add_eos else None
    texts = [text for text in (bos, eos) if text is not None]
    library.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        pair=None,
        special_tokens=[(text, library.token_to_id(text)) for text in dict.fromkeys(texts)],
    )


def _warn_of_disagreement(
    library: LibraryTokenizer, folder: Path, in_file: dict[str, Any], roles: dict[str, str]
) -> None:
    ids = library.encode("a").ids
    for flag, wanted in in_file.items():
        token_id = library.token_to_id(roles.get(flag[4:], ""))
        position = 0 if flag == "add_bos_token" else -1
        added = bool(ids) and token_id is not None and ids[position] == token_id
        if wanted is not None and bool(wanted) != added:
            logger.warning(
                "%s: tokenizer_config.json says %s=%s, but the post-processor of tokenizer.json "
                "does otherwise; "
                "tokenizer.json is followed, as transformers does.",
                folder,
                flag,
                wanted,
            )


def _cleans_up_spaces(config: dict[str, Any], library: LibraryTokenizer) -> bool:
    """Whether decode() joins " ." to "."; ignored for BPE, whose spaces are text, unless the file
    insists.
    """
    insists = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    is_bpe = type(library.model).__name__ == "BPE"
    return bool(config.get("clean_up_tokenization_spaces", False)) and (not is_bpe or bool(insists))


def _truncation_side(config: dict[str, Any]) -> str:
    side = config.get("truncation_side", "right")
    if side not in ("left", "right"):
        raise LoadError(
            f"tokenizer_config.json has truncation_side={side!r}; only 'left' and 'right' exist."
        )
    return str(side)


def _model_max_length(config: dict[str, Any]) -> int | None:
    length = config.get("model_max_length")
    if not isinstance(length, int | float) or length > LARGEST_KNOWN_LENGTH:
        return None
    return int(length)


def all_texts(facts: TokenizerFacts) -> Iterable[str]:
    """The text of every special token once: roles in their order, then the extra ones."""
    return dict.fromkeys([*facts.special_tokens.values(), *facts.extra_special_tokens])
