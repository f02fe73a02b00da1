"""From a checkpoint to a `VisionEncoder`, as exactly as decoders are loaded: every tensor in the
modules of the tower and its connector is read once, or known to be left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.models.formats.storage import Storage
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.leaves import StoredLeaves
from quire.models.loading.load_formats import WeightFiles, open_files
from quire.models.loading.matching import fitted
from quire.models.loading.random_weights import DeviceRandomLeaves, RandomLeaves
from quire.models.loading.read_ahead import Read
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.maker import Maker
from quire.models.rules import Rule, StoredTensor, stored_tensors
from quire.models.spec import Decoder
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.leaves import vision_leaves
from quire.models.vision.rules import VisionModel
from quire.ops import Ops
from quire.quantization import UNQUANTIZED

_WRAPPERS = ("", "vlm.")
"""Modules that hold a whole model: retrievers have it as one."""


@dataclass(frozen=True, slots=True)
class VisionTensors:
    """An encoder's tensors by the files' names, and those that are not left out."""

    stored: list[StoredTensor]
    own: frozenset[str]


def load_encoder(
    folder: Path,
    model: VisionModel,
    decoder: Decoder | None,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    storage: Storage | None = None,
    files: WeightFiles | None = None,
) -> VisionEncoder:
    """Build the encoder with the weights of a model folder, converted to `dtype`. The arguments are
    those of `quire.models.loading.weights.load_model`, which also says what is raised; `decoder` is
    that of the same folder, which files of the format mistral need.
    """
    place = torch.device(device)
    if files is None and load_format == "dummy":
        draw = RandomLeaves(seed) if place.type == "cpu" else DeviceRandomLeaves(seed, place)
        return _built(model, ops, draw, frozenset(), dtype, place)
    with closing(files or open_files(load_format, folder, decoder)) as files:
        found = find_tensors(model, files.entries)
        stored = fitted(found.stored, found.own, files, storage)
        in_codes = (s for s in stored if s.layout is not None and not s.layout.is_widened)
        coded = frozenset(leaf.name for s in in_codes for leaf in s.leaves)
        return _built(model, ops, StoredLeaves(files, stored), coded, dtype, place)


def _built(
    model: VisionModel,
    ops: Ops,
    read: Read,
    coded: frozenset[str],
    dtype: torch.dtype,
    device: torch.device,
) -> VisionEncoder:
    weights = WeightBuilder(
        vision_leaves(model.tower),
        read,
        dtype=dtype,
        device=device,
        coded=coded,
        folder=None,
        cache_scales={},
        sources={},
    )
    encoder = VisionEncoder(model.tower, Maker(weights, ops, 1, UNQUANTIZED, None, None))
    weights.finish()
    return encoder


def find_tensors(model: VisionModel, names: Collection[str]) -> VisionTensors:
    """Find the encoder's tensors among the `names` of files, under the prefix where most are."""
    used, family = vision_leaves(model.tower), model.family
    leaves = vision_leaves(model.whole) | used
    best: tuple[int, list[StoredTensor], str, str] | None = None
    for outer in (wrapper + outer for wrapper in _WRAPPERS for outer in family.outer):
        for root in family.roots:
            stored = stored_tensors(_under(root, model), leaves, outer)
            count = sum(s.name in names for s in stored)
            if best is None or count > best[0]:
                best = count, stored, outer, outer + root
    assert best is not None, "a family has prefixes"
    _, stored, outer, prefix = best
    wanted = [s for s in stored if any(leaf.name in used for leaf in s.leaves)]
    left_out = {s.name for s in stored} - {s.name for s in wanted}
    own = tuple(outer + module for module in family.own)
    rest = (n for n in names if n.startswith(own) and n not in left_out)
    return VisionTensors(wanted, frozenset(n for n in rest if not _ignored(n, prefix, model)))


def _under(root: str, model: VisionModel) -> tuple[Rule, ...]:
    """The rules of all tensors, the tower's after `root`."""
    of_tower, of_connector = model.rules()
    placed = (replace(r, source=r.source.replace("{prefix}", "{prefix}" + root)) for r in of_tower)
    return (*placed, *of_connector)


def _ignored(name: str, prefix: str, model: VisionModel) -> bool:
    if not name.startswith(prefix):
        return False
    bare = name.removeprefix(prefix)
    return any(re.fullmatch(pattern, bare) for pattern in model.tower_family.ignored)
