"""From the files of a draft network to a model that runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import LoadError
from quire.models.decoder import DecoderModel
from quire.models.drafting.network import DraftNetwork
from quire.models.drafting.spec import DraftDecoder
from quire.models.formats import read_storage
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.load_formats import open_files
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.spec import Decoder
from quire.ops import Ops
from quire.quantization import Recipe


def load_network(
    network: DraftNetwork,
    folder: Path,
    ops: Ops,
    target: DecoderModel,
    *,
    config: Mapping[str, Any],
    **facts: Any,
) -> DecoderModel:
    """Build the network, whose first layer's memory has the place `first_layer` in the pool. Every
    pass of one that reads states returns its own, as the one of `aux` or, where there is none, as
    the last. `facts`: that place, the recipe, and others of the arguments of `load_model`.
    """
    given, named = loading_arguments(network, folder, ops, target, config=config, **facts)
    return load_model(*given, **named)


def loading_arguments(
    network: DraftNetwork,
    folder: Path,
    ops: Ops,
    target: DecoderModel,
    *,
    config: Mapping[str, Any],
    first_layer: int,
    recipe: Recipe,
    **facts: Any,
) -> tuple[tuple[Path, Decoder, Ops], dict[str, Any]]:
    """The arguments of `load_model` for a network."""
    spec = network.spec
    feeds_raw = isinstance(spec, DraftDecoder) and not spec.inputs.feeds_normed
    # what enters the final norm is the state that would enter a layer after the last
    aux = (len(spec.blocks),) if feeds_raw and spec.final_norm is not None else ()
    return (folder, spec, ops), facts | {
        "family": network.family,
        "storage": read_storage(config),
        "options": ModelOptions(recipe=recipe, first_layer=first_layer, aux_layers=aux),
        "target": target if isinstance(spec, DraftDecoder) else None,
    }


def read_ids(network: DraftNetwork, folder: Path, load_format: LoadFormat) -> dict[str, Tensor]:
    """The tensor of a network's files that says which ids of the target it knows, by its name."""
    if network.ids is None or load_format == "dummy":
        return {}
    with closing(open_files(load_format, folder, network.spec)) as files:
        # a copy, which does not end with the file
        return {network.ids: files.read(network.ids).clone()}


def read_token_ids(
    network: DraftNetwork, folder: Path, load_format: LoadFormat, device: torch.device
) -> Tensor | None:
    """The target's ids [V'] int64 of the network's, ascending; None: they are the same. Raises
    LoadError for ids that the target does not have.
    """
    spec = network.spec
    if network.ids is None or not isinstance(spec, DraftDecoder):
        return None
    places = torch.arange(spec.vocab)
    if load_format == "dummy":
        return places.to(device)
    with closing(open_files(load_format, folder, spec)) as files:
        if network.ids not in files.entries:
            raise LoadError(f"{folder} has no tensor {network.ids}, which maps the draft's ids.")
        offsets = files.read(network.ids).flatten().to(torch.int64)
    if len(offsets) != spec.vocab:
        raise LoadError(f"{folder}: {network.ids} has {len(offsets)} entries for {spec.vocab} ids.")
    # the tensor has how far the target's ids are from the network's
    ids = places + offsets
    if ids[0] < 0 or ids[-1] >= spec.inputs.vocab:
        raise LoadError(f"{folder}: {network.ids} gives ids that the target does not have.")
    if not bool((ids[1:] > ids[:-1]).all()):
        raise LoadError(f"{folder}: {network.ids} does not map the ids in ascending order.")
    return ids.to(device)


def tensor_names(folder: Path, load_format: LoadFormat, target: Decoder) -> Collection[str]:
    """The names of all tensors in a folder; () where weights are drawn. Raises LoadError."""
    if load_format == "dummy":
        return ()
    with closing(open_files(load_format, folder, target)) as files:
        return frozenset(files.entries)
