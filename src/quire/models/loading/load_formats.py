"""Readers of weights in each format of files.

To add a format of files, write a class with `entries`, `read` and `close` and give it a row here;
plugins register theirs (plugins/tables.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from quire.models.loading.folder_files import LoadFormat, found_format
from quire.models.loading.readers.checkpoint_files import TensorEntry
from quire.models.loading.readers.mlx_files import opened
from quire.models.spec import Attention, Decoder
from quire.plugins import resolve_reference
from quire.plugins.tables import LOAD_FORMATS


class WeightFiles(Protocol):
    """The weights of a folder by their names in a Hugging Face checkpoint."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Names of the stored tensors and their places, from the headers alone."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor as stored, valid until the next call; holding it is safe. Raises LoadError."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def _pickled(folder: Path, decoder: Decoder | None) -> WeightFiles:
    from quire.models.loading.readers.pickled_files import PickledFiles

    return PickledFiles(folder)


def _streamed(folder: Path, decoder: Decoder | None) -> WeightFiles:
    from quire.models.loading.readers.streamed_files import StreamedFiles

    return StreamedFiles(folder)


def _mistral(folder: Path, decoder: Decoder | None) -> WeightFiles:
    from quire.models.loading.readers.mistral_files import MistralFiles

    assert decoder is not None, "names and order of heads follow from the decoder"
    mixer = decoder.blocks[0].mixer
    assert isinstance(mixer, Attention), "params.json describes decoders with attention"
    return MistralFiles(folder, mixer.head_dim)


_OPENERS: Mapping[str, Callable[[Path, Decoder | None], WeightFiles]] = MappingProxyType(
    {
        "safetensors": lambda folder, decoder: opened(folder),
        "pt": _pickled,
        "mistral": _mistral,
        "runai_streamer": _streamed,
    }
)


def open_files(load_format: LoadFormat, folder: Path, decoder: Decoder | None) -> WeightFiles:
    """Open the weights of a folder that are stored by their names on the hub, and those of the
    layers of a decoder's pooler that have files of their own. Raises LoadError.
    """
    chosen = found_format(folder) if load_format == "auto" else load_format
    if chosen in LOAD_FORMATS:
        files = resolve_reference(LOAD_FORMATS[chosen])(folder, decoder)
    else:
        files = _OPENERS[chosen](folder, decoder)
    pooler = None if decoder is None else decoder.pooler
    dense = () if pooler is None else pooler.dense
    own = [layer.file for layer in dense if layer.file is not None]
    if not own:
        return files
    from quire.models.loading.readers.layer_files import LayerFiles

    return LayerFiles(files, folder, own)
