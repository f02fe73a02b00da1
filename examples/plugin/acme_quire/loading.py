"""A load format: the safetensors files of a folder, read whole and counted."""

from pathlib import Path

from safetensors.torch import load_file

from quire.models.loading.load_formats import WeightFiles
from quire.models.loading.readers.tensor_map import TensorMap
from quire.models.spec import Decoder

read = {"files": 0}


def open_weights(folder: Path, decoder: Decoder | None) -> WeightFiles:
    """All tensors of the folder by name."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        read["files"] += 1
    return TensorMap(tensors, folder)
