"""From a model folder to a `ForeignModel`.

transformers reads the safetensors files, because it knows by which names older checkpoints call
their weights. The files are checked before, and after it no weight may be missing or left over.
Then products are replaced, and a short text is run both ways before the model serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from quire.errors import LoadError, WeightMismatch
from quire.models.foreign.check import LAST_STEP, Staging, check, own_logits
from quire.models.foreign.codes import (
    CodedModule,
    fill,
    find_coded,
    without_weights,
)
from quire.models.foreign.dry_run import describe_foreign, register
from quire.models.foreign.library import (
    foreign_storage,
    library_config,
    model_class,
    renamings,
    silenced,
)
from quire.models.foreign.model import ForeignModel
from quire.models.foreign.packing import pack, unpacked_products
from quire.models.foreign.spec import ForeignDecoder
from quire.models.loading.cache_scales import is_cache_scale
from quire.models.loading.matching import listed
from quire.models.loading.readers.checkpoint_files import CheckpointFiles
from quire.ops import Ops

logger = logging.getLogger(__name__)

_ADAPTER = "adapter_config.json"
_MISMATCHES = {
    "missing": "missing_keys",
    "unknown": "unexpected_keys",
    "wrong shape": "mismatched_keys",
    "errors": "error_msgs",
}


@torch.inference_mode()
def load_foreign_model(
    folder: Path,
    config: Mapping[str, Any],
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: Staging,
    load_format: str = "auto",
    seed: int = 0,
) -> ForeignModel:
    """Build the model of a config.json with the weights of a folder, converted to `dtype`.

    `load_format` dummy draws them from `seed` as transformers initialises them. Weights are read
    to the host's memory first. Raises LoadError subclasses that name what does not fit, among them
    UnsupportedArchitecture where the paged cache does not give transformers' own logits.
    """
    spec = describe_foreign(config)
    register()
    with silenced():
        if load_format == "dummy":
            model = _placed(_drawn(config, dtype, seed), device)
        else:
            with closing(CheckpointFiles(folder)) as files:
                storage = foreign_storage(config)
                renamed = str if storage is None else renamings(config)
                coded = find_coded(spec, storage, files, renamed)
                stored = _stored(folder, config, dtype, coded, spec, renamed)
                model = _placed(stored, device)
                fill(model, coded, files, spec.open_linears, device.torch)
        # before packing, which replaces the layers that transformers computes with
        expected = own_logits(model, spec)
        pack(model, ops, dtype, spec.open_linears)
    names = sorted(unpacked_products(model))
    if names:
        logger.warning(
            "Plain torch multiplies with %s, so that a request's last bits may depend on what else "
            "is in its steps.",
            listed(names),
        )
    if not spec.calls:
        logger.warning(
            "%s attends by itself: its requests are computed one after the other, each step copies "
            "their keys and values, and the last bits depend on how a prompt is cut into steps.",
            spec.architecture,
        )
    is_invariant = ops.batch_invariant and not names
    packed = ForeignModel(spec, model, ops, in_one_thread=is_invariant)
    seconds = check(packed, ops, expected, dtype, device)
    logger.info(
        "%s runs as a model of transformers: a step of %d tokens took %.1f ms, in which its Python "
        "code is called.",
        *(spec.architecture, LAST_STEP, seconds * 1000),
    )
    return packed


def _placed(model: Any, device: Staging) -> Any:
    return model.eval().requires_grad_(False).to(device.torch)


def _drawn(config: Mapping[str, Any], dtype: torch.dtype, seed: int) -> Any:
    # the process's own generator stays as it is
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)._from_config(
            library_config(config),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
        )


def _stored(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    coded: tuple[CodedModule, ...],
    spec: ForeignDecoder,
    renamed: Callable[[str], str],
) -> Any:
    """The model with all weights but those in codes."""
    if (folder / _ADAPTER).exists():
        raise LoadError(
            f"{folder / _ADAPTER}: transformers would apply this adapter. Merge it into the "
            "checkpoint, or remove the file."
        )
    kind = model_class(config)
    try:
        model, report = without_weights(kind, coded, spec).from_pretrained(
            folder,
            config=library_config(config),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except LoadError:
        raise
    except Exception as error:  # each conversion of weights fails in its own way
        text = " ".join(str(error).split())
        raise WeightMismatch(f"transformers cannot load the checkpoint: {text}") from error
    # the class without weights was for loading alone
    model.__class__ = kind
    in_codes = {n for module in coded for name in module.parts for n in (name, renamed(name))}
    in_codes |= _stacked(spec, coded)
    if problems := list(_problems(report, in_codes)):
        raise WeightMismatch("The checkpoint does not fit the model: " + "; ".join(problems) + ".")
    return model


def _stacked(spec: ForeignDecoder, coded: tuple[CodedModule, ...]) -> set[str]:
    """Names in transformers of the experts that are read here, which it would stack."""
    names = {module.linear.name for module in coded if module.expert is not None}
    parts = ("gate_up_proj", "up_proj", "down_proj")
    return {f"{name}.{part}" for name in names for part in parts}


def _problems(report: Mapping[str, Any], in_codes: Collection[str]) -> Iterator[str]:
    """Problems that transformers reports, but for the tensors that are read here: codes, and scales
    of keys and values, which are not used.
    """
    for word, key in _MISMATCHES.items():
        names = sorted(map(str, report[key]))
        if in_codes and key == "unexpected_keys":
            names = [n for n in names if n not in in_codes and not is_cache_scale(n)]
        if names:
            yield f"{word} {listed(names)}"
