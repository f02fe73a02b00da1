"""Makes what puts pictures into the prompts of a plan's model."""

from __future__ import annotations

from pathlib import Path

from quire.config.plan_parts import ModelPlan
from quire.engine.frontend.picture_prompts import PicturePrompts
from quire.media.decoding.decoder import PictureDecoder
from quire.media.fetch.fetcher import MediaFetcher
from quire.media.fetch.settings import FetchSettings
from quire.media.loader import PictureLoader
from quire.media.picture_files import check_picture_files, read_picture_settings
from quire.media.processed_cache import ProcessedCache
from quire.models import read_spec
from quire.models.reading.text_part import PART, VISION
from quire.models.spec import rope_of_axes
from quire.models.vision.families import read_vision
from quire.text.tokenizer import Tokenizer

_CACHE_BYTES = 4 << 30
"""Memory for processed pictures: prompts that come again with the same ones need no decoding."""


def picture_prompts(model: ModelPlan, tokenizer: Tokenizer) -> PicturePrompts:
    """Raises LoadError for side files that do not say how pictures are processed."""
    whole = model.hf_config[PART][VISION]
    settings = check_picture_files(
        read_picture_settings(Path(model.model_folder), whole), model.model
    )
    decoder = read_spec(model.hf_config, model.pooler)
    vision, _ = read_vision(model.hf_config, decoder.dim)
    loader = PictureLoader(
        settings,
        MediaFetcher(FetchSettings()),
        PictureDecoder(),
        ProcessedCache(_CACHE_BYTES),
        is_trusting=True,
    )
    has_axes = rope_of_axes(decoder) is not None
    return PicturePrompts(loader, tokenizer, cell=vision.tower.merge if has_axes else None)
