"""Reads a tokenizer's folder: the library's object, and the facts that only the side files know."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import processors

from quire.errors import LoadError
from quire.text.json_files import read_json
from quire.text.model_files import MOST_VOCABULARY_BYTES, has_file
from quire.text.special_tokens import (
    CLASS_DEFAULTS,
    CLASS_OF_MODEL_TYPE,
    GENERIC_CLASSES,
    add_missing_tokens,
    collect_special_tokens,
    declared_added_tokens,
)
from quire.text.template_files import read_chat_template
from quire.text.tokenizer_formats.folder import (
    SENTENCEPIECE,
    TEKKEN,
    found_mode,
    mistral_file,
    tiktoken_file,
)

if TYPE_CHECKING:
    from quire.text.tokenizer_formats.foreign import ForeignTokenizer

logger = logging.getLogger(__name__)

# Above this, model_max_length in the wild means "not known" (transformers writes 1e30).
LARGEST_KNOWN_LENGTH = 10**20


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts of the side files; `special_tokens`: a role such as "eos_token" -> the token's text."""

    special_tokens: dict[str, str]
    extra_special_tokens: tuple[str, ...]
    chat_template: str | dict[str, str] | None
    cleans_up_spaces: bool
    truncation_side: str
    model_max_length: int | None


def read_tokenizer_folder(
    folder: Path, *, mode: str = "auto"
) -> tuple[LibraryTokenizer, TokenizerFacts]:
    """Read every tokenizer file of `folder`; raises LoadError with one sentence that says what to
    do. `mode`: the engine's `tokenizer_mode`.
    """
    if not folder.is_dir():
        raise LoadError(f"{str(folder)!r} is not a folder, so there is no tokenizer to read in it.")
    config = read_json(folder / "tokenizer_config.json")
    class_name = _class_name(folder, config)
    mode = found_mode(folder) if mode == "auto" else mode
    foreign: ForeignTokenizer | None = None
    if mode == "mistral" or not _has_hub_files(folder):
        foreign = _read_foreign(folder, config, mode)
    if foreign is None:
        _refuse_repository_code(folder, config, class_name)
        library = _load_library_tokenizer(folder, config, class_name)
    else:
        library = foreign.library
        # last: side files rule over what the model's own file says
        config = {"add_bos_token": foreign.adds_bos, **foreign.roles, **config}
    if library.get_vocab_size(with_added_tokens=False) == 0:
        raise LoadError(f"The tokenizer in {folder} has an empty vocabulary: no text has tokens.")
    library.no_truncation()  # a limit stored in the file would shorten prompts silently
    library.no_padding()
    library.encode_special_tokens = bool(config.get("split_special_tokens", False))
    declared = declared_added_tokens(folder, config)
    special_tokens, extra = collect_special_tokens(config, class_name, declared, library)
    add_missing_tokens(library, declared, special_tokens, extra)
    roles = {role: str(token) for role, token in special_tokens.items()}
    _set_bos_and_eos(library, folder, config, roles, is_foreign=foreign is not None)
    return library, TokenizerFacts(
        special_tokens=roles,
        extra_special_tokens=tuple(str(token) for token in extra),
        chat_template=read_chat_template(folder, config),
        cleans_up_spaces=_cleans_up_spaces(config, library),
        truncation_side=_truncation_side(config),
        model_max_length=_model_max_length(config),
    )


def _class_name(folder: Path, config: dict[str, Any]) -> str | None:
    """The transformers class whose defaults count, without "Fast"; None: it has none."""
    model_config = read_json(folder / "config.json")
    by_model_type = CLASS_OF_MODEL_TYPE.get(str(model_config.get("model_type")))
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if name is None:
        return by_model_type
    name = str(name).removesuffix("Fast")
    if name in GENERIC_CLASSES:
        return None if has_file(folder / "tokenizer.json", MOST_VOCABULARY_BYTES) else by_model_type
    return name


def _refuse_repository_code(folder: Path, config: dict[str, Any], class_name: str | None) -> None:
    auto_map = config.get("auto_map")
    has_code = isinstance(auto_map, list) or (
        isinstance(auto_map, dict) and "AutoTokenizer" in auto_map
    )
    declared = str(config.get("tokenizer_class")).removesuffix("Fast")
    if has_code and class_name not in CLASS_DEFAULTS and declared not in GENERIC_CLASSES:
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
    if has_file(whole, MOST_VOCABULARY_BYTES):
        _refuse_short_merges(whole)
        try:
            return LibraryTokenizer.from_file(str(whole))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise LoadError(
                f"{whole} cannot be read by the tokenizers library: {error}."
            ) from error
    if all(has_file(file, MOST_VOCABULARY_BYTES) for file in (vocab, merges)):
        from quire.text.vocab_merges import build_from_vocab_and_merges

        prefix_space = bool(config.get("add_prefix_space") or False)
        return build_from_vocab_and_merges(vocab, merges, class_name, prefix_space)
    raise LoadError(_what_is_missing(folder))


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    # parsed only where there is a prefix
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _TokenizerFile(msgspec.Struct):
    model: _Model


def _refuse_short_merges(whole: Path) -> None:
    """Raise LoadError for merges from whose right part the library cannot cut the
    `continuing_subword_prefix`: it would end the process. It reports other errors itself.
    """
    try:
        model = msgspec.json.decode(whole.read_bytes(), type=_TokenizerFile).model
        prefix = (model.continuing_subword_prefix or "").encode()
        if not prefix:
            return
        merges = msgspec.json.decode(model.merges, type=list[str | tuple[str, str]])
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    for merge in merges:
        right = (merge.partition(" ")[2] if isinstance(merge, str) else merge[1]).encode()
        try:
            right[len(prefix) :].decode()
        except UnicodeDecodeError:
            is_cut = True
        else:
            is_cut = len(right) < len(prefix)
        if is_cut:
            raise LoadError(
                f"{whole} has the merge {merge!r}, whose right part does not begin with "
                f"continuing_subword_prefix {model.continuing_subword_prefix!r}."
            )


def _has_hub_files(folder: Path) -> bool:
    if has_file(folder / "tokenizer.json", MOST_VOCABULARY_BYTES):
        return True
    return all(has_file(folder / f, MOST_VOCABULARY_BYTES) for f in ("vocab.json", "merges.txt"))


def _read_foreign(folder: Path, config: dict[str, Any], mode: str) -> ForeignTokenizer | None:
    """The tokenizer of Mistral's own files (with that mode), or of a SentencePiece or tiktoken
    file; None without such files. Raises LoadError.
    """
    # most folders have a tokenizer.json
    from quire.text.tokenizer_formats.sentencepiece import read_sentencepiece
    from quire.text.tokenizer_formats.tekken import read_tekken
    from quire.text.tokenizer_formats.tiktoken import is_tiktoken, read_tiktoken

    own = mistral_file(folder) if mode == "mistral" else None
    if own is not None:
        return read_tekken(own) if own.name == TEKKEN else read_sentencepiece(own)
    pieces = folder / SENTENCEPIECE
    has_pieces = has_file(pieces, MOST_VOCABULARY_BYTES)
    if has_pieces and not is_tiktoken(pieces):
        return read_sentencepiece(pieces)
    if mode == "mistral":
        raise LoadError(
            f"{folder} has neither {TEKKEN} nor {SENTENCEPIECE}, one of which "
            "tokenizer_mode='mistral' reads. Use 'auto'."
        )
    ranks = pieces if has_pieces else tiktoken_file(folder)
    if ranks is None:
        return None
    model_type = str(read_json(folder / "config.json").get("model_type"))
    return read_tiktoken(ranks, model_type, declared_added_tokens(folder, config))


def _what_is_missing(folder: Path) -> str:
    other = [name for name in (TEKKEN, "vocab.txt") if (folder / name).exists()]
    if other == ["vocab.txt"]:
        return (
            f"{folder} has no tokenizer.json, and its vocab.txt is a WordPiece word list. Install "
            "transformers and once run "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
        )
    if other:
        return f"{folder} has no tokenizer.json: pass tokenizer_mode='mistral' for its {TEKKEN}."
    return (
        f"{folder} has no tokenizer: neither tokenizer.json, vocab.json with merges.txt, "
        f"{SENTENCEPIECE}, {TEKKEN} nor a tiktoken file is in it. Name a folder that has one "
        "through `tokenizer=`, or pass `skip_tokenizer_init=True` and token ids."
    )


def _set_bos_and_eos(
    library: LibraryTokenizer,
    folder: Path,
    config: dict[str, Any],
    roles: dict[str, str],
    *,
    is_foreign: bool,
) -> None:
    """Let the file's flags replace the post-processor where no tokenizer.json rules.

    transformers (since 5.0) takes tokenizer.json's post-processor for the truth and drops the flags
    of tokenizer_config.json; a disagreement is logged, because older releases went the
    other way.
    """
    in_file = {k: config.get(k) for k in ("add_bos_token", "add_eos_token")}
    if not is_foreign and has_file(folder / "tokenizer.json", MOST_VOCABULARY_BYTES):
        _warn_of_disagreement(library, folder, in_file, roles)
        # without one, tokenizer.json says that nothing is added, whatever the flags say
        if library.post_processor is not None:
            return
        in_file = dict.fromkeys(in_file)
    bos, eos = map(bool, in_file.values())
    install_bos_and_eos(library, roles, bos, eos)


def install_bos_and_eos(
    library: LibraryTokenizer, roles: dict[str, str], add_bos: bool, add_eos: bool
) -> None:
    """Have the post-processor add exactly these; a role without a token adds nothing."""
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
    """Whether decode() joins " ." to "."; for BPE, whose spaces are text, only if told so."""
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
