"""Functions by which methods of workers load weights themselves: reading a folder, and what comes
before and after `load_weights` of the model, which here needs nothing before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.errors import InvalidParameter
from quire.models.loading.load_formats import open_files


@dataclass
class FolderWeights:
    """A folder of weights. `prefix` is put before each name. `revision` and `fall_back_to_pt` say
    nothing of a folder; the other fields must be None.
    """

    model_or_path: str
    revision: str | None = None
    subfolder: str | None = None
    prefix: str = ""
    fall_back_to_pt: bool = True
    allow_patterns_overrides: list[str] | None = None


class FolderLoader:
    """Reads the weights of folders by their names."""

    Source = FolderWeights

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def _get_weights_iterator(self, source: FolderWeights) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor, which is valid until the next one. Raises LoadError, and
        InvalidParameter for a part of a repository.
        """
        for name in ("subfolder", "allow_patterns_overrides"):
            if (value := getattr(source, name)) is not None:
                raise InvalidParameter(name, value, "the folder's weights are read: leave it None")
        with closing(open_files("auto", Path(source.model_or_path), None)) as files:
            for name in files.entries:
                yield source.prefix + name, files.read(name)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Give a model the weights of the folder of a plan's model. Raises LoadError."""
        model.load_weights(self._get_weights_iterator(FolderWeights(str(model_config.model))))
        model.settle_weights()


def get_model_loader(load_config: Any) -> FolderLoader:
    """The loader of a plan's `load_config`."""
    return FolderLoader(load_config)


def process_weights_after_loading(
    model: Any, model_config: Any = None, target_device: Any = None
) -> None:
    """End what `load_weights` has begun. Raises EngineError where a part of a weight is missing."""
    model.settle_weights()


def initialize_layerwise_reload(model: Any) -> None:
    """Come before `load_weights` of new weights, which are packed a layer at a time anyway."""
    model.settle_weights()


finalize_layerwise_reload = process_weights_after_loading
finalize_layerwise_processing = process_weights_after_loading
