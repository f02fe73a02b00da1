"""Facts about the pictures that a model takes. Planning imports this module for such models alone:
other starts need neither the families of encoders nor the processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import UnsupportedConfigValue
from quire.media.picture_files import check_picture_files, read_picture_settings
from quire.models import read_spec
from quire.models.reading.keys import LeftKey
from quire.models.reading.text_part import config_of_whole
from quire.models.spec import Decoder
from quire.models.vision.families import read_vision
from quire.models.vision.leaves import vision_leaves


def check_pictures(
    folder: Path, config: Mapping[str, Any], processor_kwargs: Mapping[str, Any] | None
) -> tuple[LeftKey, ...]:
    """Read the encoder's config and the processor's files; returns the foreign keys of the part
    about pictures. Raises LoadError where pictures cannot be served, RequestError for
    `processor_kwargs` that the processor does not have.
    """
    model, foreign = read_vision(config, read_spec(config).dim)
    found = read_picture_settings(folder, config_of_whole(config))
    settings = check_picture_files(found, str(folder))
    if (settings.rule is None) != (model.tower.pool is not None):
        raise UnsupportedConfigValue(
            "The processor_class in the model's files is that of another kind of model, so it is "
            "not known how pictures stand in prompts."
        )
    # its result is dropped: the call refuses what the processor does not have, before the engine
    # starts
    settings.changed(processor_kwargs)
    return foreign


def num_encoder_parameters(config: Mapping[str, Any], decoder: Decoder) -> int:
    """Number of values in the weights of the vision encoder."""
    model, _ = read_vision(config, decoder.dim)
    return sum(leaf.size for leaf in vision_leaves(model.tower).values())
