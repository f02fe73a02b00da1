"""Files of a model folder that describe the model, and those with its weights. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

from quire.errors import CorruptCheckpoint, ModelNotFound
from quire.models.config_reader import read_whole_config
from quire.models.formats.side_files import with_side_file
from quire.models.reading.params_json import PARAMS, config_of_params
from quire.models.reading.text_part import text_part
from quire.text.json_files import read_plain_json
from quire.text.model_files import has_file

LoadFormat = Literal[
    "auto", "safetensors", "pt", "mistral", "runai_streamer", "sharded_state", "dummy"
]
"""Formats in an engine's plan: none is automatic; models/loading/load_formats.py reads them."""

AUTOMATIC_FORMATS = ("auto", "hf", "mmap")
"""Values of the option load_format that leave open which files are read: see `found_format`."""

PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
_MOST_HEADER_BYTES = 16 << 20
"""Most bytes of a header, enough for some 100,000 tensors."""
_POINTER = b"version https://git-lfs"
"""Beginning of the pointer that a repository has in place of a large file that was not fetched."""
_NO_WEIGHTS = (
    *("training_args.bin", "optimizer.bin", "optimizer.pt"),
    *("scheduler.pt", "scaler.pt", "rng_state.pth"),
)


def found_format(folder: Path) -> LoadFormat:
    """The format of a folder's files: safetensors before Mistral's own, these before pickles."""
    stored = [file.name for file in folder.glob("*.safetensors")]
    # Mistral publishes both kinds in one folder
    if any(not name.startswith("consolidated") for name in stored):
        return "safetensors"
    if stored and (folder / PARAMS).exists():
        return "mistral"
    if not stored and pickles(folder):
        return "pt"
    return "safetensors"  # also with none: what is missing is said where they are read


def read_folder_config(
    folder: Path, load_format: str, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The folder's config.json after `change`, or the part of it that is about text; its
    params.json in the form of a config.json with the format `mistral`, and where it is the only one
    of them. What a file of a tool says of quantised weights is its `quantization_config`. Raises
    ModelNotFound or LoadError.
    """
    config = _read(folder, load_format)
    return text_part(config if change is None else change(config))


def _read(folder: Path, load_format: str) -> dict[str, Any]:
    params = folder / PARAMS
    if load_format == "mistral" and not has_file(params):
        raise ModelNotFound(f"{folder} has no {PARAMS}, which load_format='mistral' reads.")
    if load_format == "mistral" or (has_file(params) and not has_file(folder / "config.json")):
        return config_of_params(read_plain_json(params))
    return with_side_file(read_whole_config(folder), folder)


def read_header(file: Path) -> bytes:
    """The header of a safetensors file, which is JSON; when that is parsed, it takes tens of times
    as much memory. Raises CorruptCheckpoint for one that is too long.
    """
    with file.open("rb") as stream:
        return next_header(file, stream)


def next_header(file: Path, stream: BinaryIO) -> bytes:
    """The header of a safetensors file that is open at its beginning: see `read_header`."""
    first = stream.read(8)
    if first == _POINTER[:8] and stream.read(len(_POINTER) - 8) == _POINTER[8:]:
        raise CorruptCheckpoint(
            f"{file} is a pointer of Git LFS and not the file itself: fetch that with "
            "`git lfs pull`."
        )
    size = int.from_bytes(first, "little")
    # checked before it is read: the eight bytes may say anything
    if size > _MOST_HEADER_BYTES:
        raise CorruptCheckpoint(
            f"{file} is not a valid safetensors file: its header would have {size} bytes, and "
            f"such a header may have at most {_MOST_HEADER_BYTES}."
        )
    return stream.read(size)


def pickles(folder: Path) -> list[Path]:
    """The files of pickled weights with the first ending of which there are some."""
    for pattern in PICKLE_PATTERNS:
        found = sorted(f for f in folder.glob(pattern) if f.name not in _NO_WEIGHTS)
        if found:
            return found
    return []
