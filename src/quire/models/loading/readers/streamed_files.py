"""Safetensors files read by `runai_model_streamer`: many threads at once, for storage that is slow
for one.

The headers are read and checked as those of mapped files. A file's tensors are held until one of
another file is asked for, so loading takes the memory of one file in addition.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError
from quire.models.loading.readers.checkpoint_files import CheckpointFiles

_PACKAGE = "runai_model_streamer"


def require_streamer() -> None:
    """Raise LoadError unless the package is installed."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise LoadError(
            "load_format='runai_streamer' needs the package runai-model-streamer: install "
            "quire[runai], or leave load_format out."
        )


class StreamedFiles:
    """Read access by tensor name, a whole file at a time."""

    def __init__(self, folder: Path) -> None:
        """List every tensor. Raises LoadError without the package, else as `CheckpointFiles`."""
        require_streamer()
        files = CheckpointFiles(folder)
        files.close()
        self.entries = files.entries
        self._streamer = importlib.import_module(_PACKAGE).SafetensorsStreamer
        self._held: tuple[Path, dict[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        file = self.entries[name].file
        if self._held is None or self._held[0] != file:
            self._held = None
            self._held = file, self._stream(file)
        return self._held[1][name]

    def close(self) -> None:
        """Give the held tensors back."""
        self._held = None

    def _stream(self, file: Path) -> dict[str, Tensor]:
        try:
            with self._streamer() as streamer:
                streamer.stream_file(str(file))
                # the streamer's own memory ends with it
                return {name: tensor.clone() for name, tensor in streamer.get_tensors()}
        except Exception as error:  # the package raises several kinds of its own
            raise CorruptCheckpoint(f"{file} cannot be streamed: {error}") from error
