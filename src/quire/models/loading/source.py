"""From the name of a model to a folder on this machine: a folder as it is, or a hub id through
huggingface_hub.

Only data is fetched (configs, tokenizer files, safetensors, templates); Python files of a
repository are never downloaded, so they cannot be executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from quire.errors import ModelNotFound

What = Literal["config", "tokenizer", "weights", "all"]

_CONFIG = ["config.json", "generation_config.json"]
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
]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_PATTERNS: dict[What, list[str]] = {
    "config": _CONFIG,
    "tokenizer": _CONFIG + _TOKENIZER,
    "weights": _CONFIG + _WEIGHTS,
    "all": _CONFIG + _TOKENIZER + _WEIGHTS,
}
_NOT_WANTED = ["*/*.safetensors", "consolidated*.safetensors"]  # other copies of the same weights


def locate(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    download_dir: str | Path | None = None,
    what: What = "all",
) -> Path:
    """The folder that has the wanted files of a model, downloaded first where `model` is a hub id.

    `download_dir` replaces the hub's cache folder. Without a network, what the cache has is used.
    Raises ModelNotFound.
    """
    folder = Path(model).expanduser()
    if str(model) and folder.is_dir():
        return folder
    if not _is_hub_id(model):
        raise ModelNotFound(
            f"There is no folder {str(model)!r}, and it is no hub id (owner/name) either."
        )
    return _fetch(str(model), revision, token, download_dir, what)


def _is_hub_id(model: str | Path) -> bool:
    """At most one slash, and nothing that only a path has."""
    name = str(model)
    return bool(name) and name.count("/") <= 1 and name[0] not in "./~" and not name.endswith("/")


def _fetch(
    repo: str,
    revision: str | None,
    token: str | bool | None,
    download_dir: str | Path | None,
    what: What,
) -> Path:
    import huggingface_hub  # here, because it takes long to import and a folder does not need it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                cache_dir=download_dir,
                allow_patterns=_PATTERNS[what],
                ignore_patterns=_NOT_WANTED,
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
        (errors.HFValidationError, "this is no valid hub id"),
    ]
    for kind, reason in reasons:
        if isinstance(error, kind):
            return f"Model {at} was not found: {reason}."
    return f"Model {at} could not be fetched: {type(error).__name__}: {error}"
