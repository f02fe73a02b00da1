"""From a checkpoint to a `DecoderModel`: exact, and never holding the weights twice.

Exact: before anything is read, the names and shapes of the files are compared with what the spec
needs, and one `WeightMismatch` lists both sides. While loading, each leaf is copied once from the
mapped file into the fused tensor that the decoder asked for, which goes to the ops provider at
once. The engine's weights never stay views of the file: replacing or truncating a checkpoint under
a running engine must not change or kill it. (While threads still pack them, a lease on the file
holds up whoever would: quire/hardware/packed_ahead.py.)
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import torch

from quire.distributed.worker_group import WorkerGroup
from quire.errors import LoadError, NotBuiltYet
from quire.models.cutting.sharding import has_bits_of_one, kept_whole, own_parts, shard
from quire.models.cutting.stages import cut
from quire.models.decoder import DecoderModel
from quire.models.families import find_family
from quire.models.formats import read_storage
from quire.models.formats.storage import Storage
from quire.models.loading.ahead.headers import fetch_small_tensors
from quire.models.loading.folder_files import LoadFormat, read_folder_config
from quire.models.loading.leaves import OpenLeaves, open_leaves
from quire.models.loading.load_formats import WeightFiles
from quire.models.loading.options import ModelOptions
from quire.models.loading.read_ahead import Read, ReadAhead
from quire.models.loading.rounding.recipes import for_decoder
from quire.models.loading.sharded_state import check_pattern, save_leaves
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.parameters import parameters
from quire.models.rules import Family
from quire.models.spec import Decoder, PipelineStage
from quire.ops import Ops
from quire.quantization import Recipe

logger = logging.getLogger(__name__)

_USUAL = ModelOptions()


def load_model(
    folder: Path,
    decoder: Decoder,
    ops: Ops,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    family: Family | None = None,
    storage: Storage | None = None,
    weights_folder: Path | None = None,
    options: ModelOptions = _USUAL,
    target: DecoderModel | None = None,
    files: WeightFiles | None = None,
) -> DecoderModel:
    """Build the decoder with the weights of a model folder, converted to `dtype`; keys and values
    will be in `kv_dtype` (default: the same).

    `load_format`: which files have them (models/loading/load_formats.py); dummy draws them from
    `seed` and reads none (other values on a GPU, where they are made). `max_model_len` (default:
    the spec's context) sizes position tables. `family` says how tensors are named, and `storage`
    how the files store quantised weights; without a family, both are those of the folder's
    config.json. `weights_folder`: where large weights are kept in files instead of memory.
    `target`: of a draft network. `files` has the weights instead of the folder. With a group among
    the options it is the model of one worker, which takes its own part of each leaf; with a stage
    it has the leaves of its layers. Raises LoadError subclasses that name file and tensor.
    """
    if family is None and load_format != "dummy":
        config = read_folder_config(folder, load_format)
        family, storage = find_family(config), read_storage(config)
    if storage is not None:
        _warn_of(storage, dtype)
    # names of leaves in a recipe are the checkpoint's, those of the decoder are canonical
    options = replace(options, recipe=for_decoder(options.recipe, family, decoder))
    place = torch.device(device)
    length = _checked_length(decoder, max_model_len)
    group = options.group
    own = own_part(decoder, options.recipe, storage, group, options.stage)
    if files is not None:
        options = replace(options, stored=None)  # which is of the folder
    if options.stored is not None and options.stored.open():
        fetch_small_tensors(folder)  # all that is left to read

    def build(read: Read, leaves: OpenLeaves) -> DecoderModel:
        weights = WeightBuilder(
            parameters(own),
            read,
            dtype=dtype,
            device=place,
            coded=leaves.coded,
            folder=weights_folder,
            cache_scales=leaves.cache_scales,
            sources=leaves.sources,
            cut={} if group is None else own_parts(decoder, own, group.rank, group.size),
        )
        model = DecoderModel(
            own, weights, ops, max_model_len=length, options=options, target=target
        )
        weights.finish()
        if options.stage is not None and model.adapters is not None:
            # a table that is here for the head, or for a draft network, embeds nothing
            here = (name for name in parameters(own) if own.embeds or name != "embed.weight")
            model.adapters.add_other_stages(here)
        if options.stored is not None:
            options.stored.finish()
        return model

    with open_leaves(
        *(folder, decoder, own),
        load_format=load_format,
        device=place,
        seed=seed,
        family=family,
        storage=storage,
        group=group,
        kv_dtype=kv_dtype or dtype,
        files=files,
    ) as leaves:
        # from the mapped file to the packed weight is one pass on CPUs; a GPU waits for copies,
        # which another thread prepares
        if place.type == "cpu" or (load_format == "dummy" and files is None):
            return build(leaves.read, leaves)
        ahead = ReadAhead(leaves.read, parameters(own).values(), is_pinned=True)
        try:
            return build(ahead, leaves)
        finally:
            ahead.close()


def check_weights(
    folder: Path,
    decoder: Decoder,
    *,
    device: torch.device,
    load_format: LoadFormat,
    family: Family,
    storage: Storage | None,
    recipe: Recipe,
    group: WorkerGroup | None,
    kv_dtype: torch.dtype,
    files: WeightFiles | None = None,
) -> None:
    """Raise what `load_model` would by names, shapes and sizes; no weight is read."""
    recipe = for_decoder(recipe, family, decoder)
    with open_leaves(
        *(folder, decoder, own_part(decoder, recipe, storage, group)),
        load_format=load_format,
        device=device,
        family=family,
        storage=storage,
        group=group,
        kv_dtype=kv_dtype,
        files=files,
    ):
        pass


def save_sharded_state(
    folder: Path,
    decoder: Decoder,
    target: Path,
    *,
    device: torch.device,
    load_format: LoadFormat,
    seed: int,
    family: Family,
    storage: Storage | None,
    recipe: Recipe,
    group: WorkerGroup | None,
    stage: PipelineStage | None = None,
    pattern: str | None = None,
    max_size: int | None = None,
) -> list[Path]:
    """Write the weights that `load_model` would read for a worker into files of its own in
    `target`, for the load format sharded_state; `pattern` and `max_size`: see `save_leaves`.

    Raises InvalidParameter for these, NotBuiltYet for weights in codes, LoadError for what cannot
    be read or written.
    """
    check_pattern(pattern, stage)
    recipe = for_decoder(recipe, family, decoder)
    own = own_part(decoder, recipe, storage, group, stage)
    with open_leaves(
        *(folder, decoder, own),
        load_format=load_format,
        device=device,
        seed=seed,
        family=family,
        storage=storage,
        group=group,
    ) as leaves:
        if leaves.coded:
            raise NotBuiltYet(
                "method",
                "save_sharded_state of a quantised checkpoint",
                "Keep the checkpoint: each worker reads its part of it.",
            )
        rank = 0 if group is None else group.rank
        own_leaves = parameters(own).values()
        return save_leaves(target, rank, own_leaves, leaves.read, stage=stage, max_size=max_size)


def own_part(
    decoder: Decoder,
    recipe: Recipe,
    storage: Storage | None,
    group: WorkerGroup | None,
    stage: PipelineStage | None = None,
) -> Decoder:
    """The part of the decoder that a worker has, of a stage only its layers."""
    own = decoder if group is None else _sharded(decoder, group, inputs_together(recipe, storage))
    return own if stage is None else cut(own, stage)


def _sharded(decoder: Decoder, group: WorkerGroup, inputs: int) -> Decoder:
    """The part of one of the group's workers; `inputs` of projections stay together."""
    own = shard(decoder, group.size, inputs)
    # the first rank speaks for all
    for why, layers in kept_whole(decoder, group.size, inputs).items() if group.rank == 0 else ():
        logger.info(
            "Layers %s have %s: each of the %d workers computes all of that part.",
            *(", ".join(map(str, layers)), why, group.size),
        )
    if group.rank == 0 and not has_bits_of_one(decoder, group.size, inputs):
        logger.info(
            "%d workers add up this model's products in an order of their own, and do not give the "
            "bits of one worker.",
            group.size,
        )
    return own


def _warn_of(storage: Storage, dtype: torch.dtype) -> None:
    """Say in which ways the model differs from what its checkpoint's format means."""
    if storage.skipped_rounding is not None:
        logger.warning(
            "The checkpoint's format rounds activations %s; here they keep their values, and only "
            "its weights are rounded.",
            storage.skipped_rounding,
        )
    if storage.widened_because is not None:
        logger.warning(
            "The weights of the checkpoint, quantised with %s, are widened to %s while they are "
            "loaded, and take as much memory as unquantised ones: %s.",
            *(storage.method, str(dtype).removeprefix("torch."), storage.widened_because),
        )


def inputs_together(recipe: Recipe, storage: Storage | None) -> int:
    """Inputs of projections that must stay together when these are cut."""
    return recipe.group if storage is None else storage.group


def _checked_length(decoder: Decoder, max_model_len: int | None) -> int:
    length = decoder.context if max_model_len is None else max_model_len
    if length is None:
        return sys.maxsize  # nothing in the model has a size by positions
    if decoder.learned_positions and length > decoder.learned_positions:
        raise LoadError(
            f"max_model_len={length} is not possible: the model has learned "
            f"{decoder.learned_positions} positions and knows no others."
        )
    return length
