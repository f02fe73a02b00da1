"""From the name of a model or adapter to a folder on this machine: a folder as it is, or a hub id
through huggingface_hub.

Only data is fetched (configs, tokenizer files, weights, templates); Python files of a repository
are never downloaded, so they cannot be executed. Pickled weights are fetched only where there are
no others, and read without unpickling more than tensors.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from quire.environment import expanded
from quire.errors import AdapterNotFound, ModelNotFound
from quire.models.formats.side_files import SIDE_FILES

What = Literal["config", "tokenizer", "weights", "all"]

_CONFIG = ["config.json", "generation_config.json", *SIDE_FILES]
_TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
]
_SENTENCES = [
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_SpladePooling/config.json",
    "*_Dense/config.json",
    "*_Normalize/config.json",
]
"""Files of sentence-transformers about a model."""
_DENSE = ["*_Dense/model.safetensors", "*_Dense/pytorch_model.bin"]
"""The weights of its Dense modules."""
_PICKLES = ["*.bin", "*.bin.index.json", "*.pt", "*.pth"]
_SAFETENSORS = ["*.safetensors", "*.safetensors.index.json"]
_WEIGHTS = {
    "mistral": ["params.json", "consolidated*.safetensors", "consolidated.safetensors.index.json"],
    "pt": _PICKLES,
}
"""Patterns of files by load format; the others read `_SAFETENSORS`."""
_OF_MISTRAL = ["consolidated*.safetensors"]
_COPIES = ["*/*.safetensors", "*/*.bin", "*/*.pt", "*/*.pth"]
"""Other copies of the same weights."""


def locate(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    download_dir: str | Path | None = None,
    what: What = "all",
    load_format: str = "auto",
) -> Path:
    """The folder that has the wanted files of a model, downloaded first where `model` is a hub id.

    `download_dir` replaces the hub's cache folder. `load_format` says which files have the weights;
    with "auto" those of `mistral` and then `pt` are fetched where there are no others. Without a
    network, what the cache has is used. Raises ModelNotFound.
    """
    folder = expanded(model)
    if str(model) and folder.is_dir():
        return folder
    if folder.is_file():
        hint = "Give the folder of the model, with its config.json and safetensors files."
        raise ModelNotFound(f"{str(model)!r} is a file. {hint}")
    if not _is_hub_id(model):
        raise ModelNotFound(
            f"There is no folder {str(model)!r}, and it is not a hub id (owner/name) either."
        )
    fetch = partial(_fetch, str(model), revision, token, download_dir)
    found = fetch(_patterns(what, load_format))
    if what in ("weights", "all") and any(found.glob("*_Dense/config.json")):
        # these are in folders, where other weights are ignored as copies
        fetch(_DENSE, ignored=[])
    if load_format != "auto" or what not in ("weights", "all"):
        return found
    # one after the other: a repository may have all kinds, and each is as large as the model
    for other in ("mistral", "pt"):
        if any(found.glob("*.safetensors")):
            break
        found = fetch(_patterns(what, other))
    return found


def locate_adapter(folder: Path) -> Path:
    """The folder of an adapter: an absolute one as it is, and the files of a repository on the hub,
    downloaded first. Raises AdapterNotFound.
    """
    if folder.is_absolute():
        return folder
    try:
        return _fetch(str(folder), None, None, None, ["adapter_config.json", "adapter_model.*"], [])
    except ModelNotFound as error:
        said = str(error).removeprefix("Model ")
        raise AdapterNotFound(f"There is no folder {str(folder)!r}. On the hub: {said}") from error


def _patterns(what: What, load_format: str) -> list[str]:
    """The names of the files to fetch."""
    wanted = [*_CONFIG, *_SENTENCES]
    if what in ("tokenizer", "all"):
        wanted += _TOKENIZER
    if what in ("weights", "all"):
        wanted += _WEIGHTS.get(load_format, _SAFETENSORS)
    return wanted


def _is_hub_id(model: str | Path) -> bool:
    """At most one slash, and nothing that only a path has."""
    name = str(model)
    return bool(name) and name.count("/") <= 1 and name[0] not in "./~" and not name.endswith("/")


def _fetch(
    repo: str,
    revision: str | None,
    token: str | bool | None,
    download_dir: str | Path | None,
    wanted: list[str],
    ignored: list[str] | None = None,
) -> Path:
    import huggingface_hub  # here, because it takes long to import and a folder does not need it

    if ignored is None:
        ignored = _COPIES + ([] if "params.json" in wanted else _OF_MISTRAL)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                cache_dir=download_dir,
                allow_patterns=wanted,
                ignore_patterns=ignored,
            )
        )
    except Exception as error:
        raise ModelNotFound(_why(repo, revision, error)) from error


def _why(repo: str, revision: str | None, error: Exception) -> str:
    """One sentence for each class of the many exceptions of hub and network."""
    from huggingface_hub import errors

    at = f"{repo} at revision {revision}" if revision else repo
    reasons: list[tuple[Any, str]] = [  # the narrower class first
        (
            errors.GatedRepoError,
            "its owner restricts access: accept the terms on its page and pass hf_token",
        ),
        (
            errors.RepositoryNotFoundError,
            "it is neither a folder here nor on the hub (a private repository needs hf_token)",
        ),
        (errors.RevisionNotFoundError, "the repository has no such revision"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached and the cache lacks it"),
        (errors.OfflineModeIsEnabled, "offline mode is on and the cache lacks it"),
        (errors.HFValidationError, "this is not a valid hub id"),
    ]
    for kind, reason in reasons:
        if isinstance(error, kind):
            return f"Model {at} was not found: {reason}."
    return f"Model {at} could not be fetched: {type(error).__name__}: {error}"
