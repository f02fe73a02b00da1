"""Loads the encoders of a model that takes more than text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire.executor.platform import Platform
from quire.executor.worker_config import WorkerConfig
from quire.models import read_spec
from quire.models.formats import read_storage
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.families import has_vision, read_vision
from quire.models.vision.loading import load_encoder


def vision_loader(config: WorkerConfig, platform: Platform) -> Callable[[], VisionEncoder] | None:
    """Return the function that loads the vision encoder, at the start and after sleep; None: the
    model takes text alone.
    """
    model = config.model
    if not has_vision(model.hf_config):
        return None
    decoder = read_spec(model.hf_config, model.pooler)
    found, _ = read_vision(model.hf_config, decoder.dim)
    return partial(
        load_encoder,
        *(Path(model.model_folder), found, decoder, platform.ops),
        dtype=config.dtype,
        device=platform.device.torch,
        load_format=config.load_format,
        seed=model.seed,
        storage=read_storage(model.hf_config),
    )
