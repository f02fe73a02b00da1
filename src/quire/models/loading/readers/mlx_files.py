"""Checkpoints of mlx-lm, which has the experts of a layer in one tensor for each projection, under
the names of Hugging Face checkpoints with a tensor for each expert.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from quire.models.formats.mlx import expert_names
from quire.models.loading.readers.checkpoint_files import CheckpointFiles, TensorEntry


class MlxFiles:
    """Read access by tensor name; tensors of all experts are read one expert at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises what `CheckpointFiles` raises."""
        self._files = CheckpointFiles(folder)
        self._stored: dict[str, tuple[str, int]] = {}
        self.entries: dict[str, TensorEntry] = {}
        for stored, entry in self._files.entries.items():
            count, *shape = entry.shape or (0,)
            names = expert_names(stored, count)
            if not names:
                self.entries[stored] = entry
            for expert, name in enumerate(names):
                self._stored[name] = stored, expert
                self.entries[name] = TensorEntry(entry.file, tuple(shape), entry.dtype)

    def read(self, name: str) -> Tensor:
        if name not in self._stored:
            return self._files.read(name)
        return self._files.read_row(*self._stored[name])

    def close(self) -> None:
        self._files.close()


def opened(folder: Path) -> CheckpointFiles | MlxFiles:
    """The safetensors files of a folder, by the names of Hugging Face checkpoints."""
    files = CheckpointFiles(folder)
    if not any(expert_names(name, 1) for name in files.entries):
        return files
    files.close()
    return MlxFiles(folder)
