"""From a model folder to a `ForeignModel`.

transformers reads the safetensors files, because it knows by which names older checkpoints call
their weights. The files are checked before, and after it no weight may be missing or left over.
Then products are replaced, and a short text is run both ways before the model serves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.errors import LoadError, WeightMismatch
from quire.models.foreign.attention import ATTENTION
from quire.models.foreign.check import Staging, check, own_logits
from quire.models.foreign.dry_run import describe_foreign, register
from quire.models.foreign.library import library_config, model_class, silenced
from quire.models.foreign.model import ForeignModel
from quire.models.foreign.packing import pack, unpacked_products
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
        is_dummy = load_format == "dummy"
        model = _drawn(config, dtype, seed) if is_dummy else _stored(folder, config, dtype)
        model = model.eval().requires_grad_(False).to(device.torch)
        expected = own_logits(model, spec.vocab)
        pack(model, ops, dtype, spec.open_linears)
    names = sorted(unpacked_products(model))
    if names:
        logger.warning(
            "Plain torch multiplies with %s, so that a request's last bits may depend on what else "
            "is in its steps.",
            listed(names),
        )
    is_invariant = ops.batch_invariant and not names
    packed = ForeignModel(spec, model, ops, in_one_thread=is_invariant)
    check(packed, ops, expected, dtype, device)
    return packed


def _drawn(config: Mapping[str, Any], dtype: torch.dtype, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)._from_config(
            library_config(config),
            dtype=dtype,
            attn_implementation=ATTENTION,
            experts_implementation="eager",
        )


def _stored(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    CheckpointFiles(folder).close()  # raises for files that are not what they claim to be
    if (folder / _ADAPTER).exists():
        raise LoadError(
            f"{folder / _ADAPTER}: transformers would apply this adapter. Merge it into the "
            "checkpoint, or remove the file."
        )
    try:
        model, report = model_class(config).from_pretrained(
            folder,
            config=library_config(config),
            dtype=dtype,
            attn_implementation=ATTENTION,
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
    if problems := list(_problems(report)):
        raise WeightMismatch("The checkpoint does not fit the model: " + "; ".join(problems) + ".")
    return model


def _problems(report: Mapping[str, Any]) -> Iterator[str]:
    for word, key in _MISMATCHES.items():
        if report[key]:
            yield f"{word} {listed(sorted(map(str, report[key])))}"
