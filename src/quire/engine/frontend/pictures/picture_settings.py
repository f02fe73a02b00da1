"""Makes what puts pictures into the prompts of a plan's model."""

from __future__ import annotations

from pathlib import Path

from quire.config.plan_parts import MediaPlan, ModelPlan
from quire.engine.frontend.pictures.lone_pictures import LonePictures
from quire.engine.frontend.pictures.picture_prompts import PicturePrompts
from quire.engine.frontend.pictures.prompts_with_pictures import PromptsWithPictures
from quire.environment import MediaEnvironment, read_environment
from quire.media.decoding.decoder import DecodeLimits, PictureDecoder
from quire.media.decoding.rgb import MAX_PIXELS
from quire.media.fetch.fetcher import MediaFetcher
from quire.media.fetch.settings import FetchSettings
from quire.media.given_rows import RowsReader
from quire.media.loader import PictureLoader
from quire.media.picture_files import (
    PictureSettings,
    check_picture_files,
    read_picture_settings,
)
from quire.media.processed_cache import ProcessedCache
from quire.media.remaking import PictureRemaker
from quire.models import read_spec
from quire.models.reading.text_part import config_of_whole
from quire.models.spec import rope_of_axes
from quire.models.vision.families import read_vision
from quire.text.tokenizer import Tokenizer

_PLAIN = (224, 224)
"""Size of a picture that no processor splits."""


def picture_prompts(
    model: ModelPlan, media: MediaPlan, tokenizer: Tokenizer
) -> PromptsWithPictures:
    """Raises LoadError for side files that do not say how pictures are processed."""
    whole = config_of_whole(model.hf_config)
    folder = model.model_folder
    files = check_picture_files(read_picture_settings(Path(folder), whole), folder)
    settings = PictureSettings(files.changed(media.processor_kwargs), files.rule)
    decoder = read_spec(model.hf_config, model.pooler)
    vision, _ = read_vision(model.hf_config, decoder.dim)
    environment = read_environment().media
    limits = DecodeLimits(max_pixels=environment.max_pixels or MAX_PIXELS)
    cell = vision.tower.merge if rope_of_axes(decoder) is not None else None
    rows = RowsReader(
        model.takes_media_embeds and vision.tower.pool is None,
        tuple(sorted({decoder.dim, decoder.dim * (1 + len(vision.tower.deepstack))})),
        cell,
        settings.read().layout(*_PLAIN),
    )
    loader = PictureLoader(
        settings,
        MediaFetcher(_fetch_settings(media, environment)),
        PictureDecoder(limits),
        ProcessedCache(media.cache_bytes),
        most_pictures=media.limits["image"],
        rows=rows,
        background=media.background,
    )
    if vision.tower.pool is not None:
        return LonePictures(loader, PictureRemaker(limits))
    return PicturePrompts(
        loader,
        PictureRemaker(limits),
        tokenizer,
        cell=cell,
        interleaves=media.interleaves,
    )


def _fetch_settings(media: MediaPlan, environment: MediaEnvironment) -> FetchSettings:
    most = environment.max_bytes
    return FetchSettings(
        allowed_domains=media.allowed_domains,
        local_root=media.local_folder,
        allows_redirects=environment.allows_redirects,
        allows_private=environment.allows_private,
        proxies=environment.proxies,
        max_bytes=most,
        max_total_bytes=2 * most,
        max_held_bytes=8 * most,
        timeout_s=environment.timeout_s,
        total_s=12 * environment.timeout_s,
        num_at_once=environment.num_at_once,
    )
