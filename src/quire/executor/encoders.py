"""Opens the encoders of a model that takes more than text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.errors import LoadError
from quire.executor.kv_tier.tiered_encoder import TieredEncoder
from quire.executor.platform import Platform
from quire.executor.worker_config import MediaFacts, WorkerConfig
from quire.models import find_family, read_spec
from quire.models.formats import read_storage
from quire.models.reading.text_part import has_vision
from quire.models.spec import Decoder, rope_of_axes
from quire.ops import Ops
from quire.ops.attention import SpanPlan
from quire.runner.encoder_outputs import Encoder, GivenEmbeddings
from quire.runner.model import RunnableModel
from quire.runner.residence import LoadedModel
from quire.step.media import EMBEDS, ROWS_OF_EMBEDS

if TYPE_CHECKING:
    from quire.models.vision.encoder import VisionEncoder


class OpenEncoders(NamedTuple):
    """The encoders of a worker by modality, and the facts about them; `models` are those with
    weights, `num_deep` layers of the decoder get further rows. result_width: that of
    `EncoderOutputs`.
    """

    by_modality: Mapping[str, Encoder]
    models: Sequence[LoadedModel]
    num_deep: int
    facts: MediaFacts
    result_width: int | None = None


def open_encoders(config: WorkerConfig, platform: Platform, model: RunnableModel) -> OpenEncoders:
    """Load the encoders that the model's files have, and take those that the config makes. A later
    pipeline stage has none, and the same facts about those of the first.
    """
    if isinstance(model.spec, Decoder) and not model.spec.embeds:
        return OpenEncoders({}, [], 0, _media_facts(config, _elsewhere(config, model)))
    encoders, models, num_deep = dict(config.make_encoders(model)), [], 0
    result_width = None
    if has_vision(config.model.hf_config):
        from quire.models.vision.picture_encoder import IMAGE, PictureEncoder  # few take pictures

        load = _vision_loader(config, platform)
        keeps_outputs = config.model.encoder_transfer is not None
        if keeps_outputs:
            from quire.executor.encoder_transfer import connected, naming_files  # few engines do

            load = naming_files(load, config.model)
        vision = load()
        encoders[IMAGE] = PictureEncoder(vision, config.max_len)
        if keeps_outputs:
            encoders[IMAGE] = connected(config, platform, encoders[IMAGE], vision)
        if config.memory.kv_tier is not None:
            encoders[IMAGE] = _tiered(config, platform, encoders[IMAGE], vision)
        models.append(LoadedModel(vision, load))
        num_deep = len(vision.spec.deepstack)
        _check_deep(num_deep, model.spec)
        if vision.spec.pool is not None:
            result_width = vision.spec.width
    if config.model.takes_prompt_embeds or config.model.takes_media_embeds:
        encoders[EMBEDS] = _given(config, platform, num_deep)
    facts = _media_facts(config, {name: one.max_rows for name, one in encoders.items()})
    return OpenEncoders(encoders, models, num_deep, facts, result_width)


def _tiered(
    config: WorkerConfig, platform: Platform, encoder: Encoder, vision: VisionEncoder
) -> TieredEncoder:
    """The encoder with a tier for its rows, which is bound when it is opened."""
    spec = vision.spec
    decoder = read_spec(config.model.hf_config, config.model.pooler)
    width = spec.width if spec.pool is not None else decoder.dim * (1 + len(spec.deepstack))
    return TieredEncoder(
        encoder, torch.empty(width, dtype=config.torch_dtype, device=platform.device.torch)
    )


def _given(config: WorkerConfig, platform: Platform, num_deep: int) -> GivenEmbeddings:
    """The encoder of prompts that are embeddings."""
    model = config.model
    like = torch.empty(0, dtype=config.torch_dtype, device=platform.device.torch)
    scale, decoder = 1.0, read_spec(model.hf_config, model.pooler)
    if find_family(model.hf_config, model.pooler).scales_given:
        # rounded as that of the model's own table (models/assembly.py)
        scale = torch.tensor(decoder.embed_scale, dtype=config.torch_dtype).item()
    width = decoder.table_width
    return GivenEmbeddings(ROWS_OF_EMBEDS, like, scale=scale, num_deep=num_deep, width=width)


def _vision_loader(config: WorkerConfig, platform: Platform) -> Callable[[], VisionEncoder]:
    """Return the function that loads the vision encoder, at the start and after sleep."""
    from quire.models.vision.families import read_vision
    from quire.models.vision.loading import load_encoder

    model = config.model
    decoder = read_spec(model.hf_config, model.pooler)
    found, _ = read_vision(model.hf_config, decoder.dim)
    if found.has_spans and not _has_spans(platform.ops):
        raise LoadError(
            "In this model, tokens of a picture attend to those after them, which the "
            "attention chosen here does not compute: that of the providers cpu, triton and torch "
            "does. language_model_only=True serves its text here."
        )
    return partial(
        load_encoder,
        *(Path(model.model_folder), found, decoder, platform.ops),
        dtype=config.torch_dtype,
        device=platform.device.torch,
        load_format=config.weights_format,
        seed=config.weights_seed,
        storage=read_storage(model.hf_config),
    )


def _has_spans(ops: Ops) -> bool:
    none = np.zeros(0, dtype=np.int32)
    plan = ops.plan_attention(
        query_start=np.zeros(1, dtype=np.int32),
        seq_lens=none,
        block_table=torch.zeros((0, 1), dtype=torch.int32),
        block_size=16,
        window=None,
    )
    return isinstance(plan, SpanPlan)


def _elsewhere(config: WorkerConfig, model: RunnableModel) -> dict[str, int]:
    """By modality the most rows that an item has, of the encoders that `open_encoders` opens where
    the first stage is.
    """
    found = {name: one.max_rows for name, one in config.make_encoders(model).items()}
    if has_vision(config.model.hf_config):
        from quire.models.vision.picture_encoder import IMAGE

        found[IMAGE] = config.max_len
    if config.model.takes_prompt_embeds or config.model.takes_media_embeds:
        found[EMBEDS] = ROWS_OF_EMBEDS
    return found


def _check_deep(num_deep: int, spec: object) -> None:
    """Refuse a first stage without some of the layers that get further rows of pictures."""
    if isinstance(spec, Decoder) and spec.stage is not None and len(spec.blocks) < num_deep:
        raise LoadError(
            f"Pictures enter the first {num_deep} layers of this model, and its first stage has "
            f"{len(spec.blocks)} of them: give it all, with QUIRE_PP_LAYER_PARTITION."
        )


def _media_facts(config: WorkerConfig, max_rows: Mapping[str, int]) -> MediaFacts:
    """max_rows: by modality."""
    if not max_rows:
        return MediaFacts()
    num_rows = max(config.step_size, *max_rows.values())
    decoder = read_spec(config.model.hf_config, config.model.pooler)
    rope = rope_of_axes(decoder)
    return MediaFacts(tuple(max_rows), num_rows, 1 if rope is None else max(rope.axes) + 1)
