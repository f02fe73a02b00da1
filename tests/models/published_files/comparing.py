"""A published config.json is refused, or starts; in small it is compared with transformers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.errors import LoadError
from quire.models.config_reader import read_config
from quire.models.families import read_spec
from quire.models.reading.floats import decoded
from quire.models.reading.reference import reference_of
from quire.models.reading.text_part import PART, text_part
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full
from tests.models.published_files.shrink import VOCAB, shrunk
from tests.models.test_text_parts import judge_of

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
LENGTH = 21


@dataclass(frozen=True)
class Outcome:
    """`equal` and `differs` are about logits in small; `starts`: transformers does not have the
    class, or not in small, as `why` says; `refused`: why.
    """

    kind: Literal["equal", "differs", "starts", "refused"]
    why: str = ""


def outcome_of(config: dict[str, Any], folder: Path) -> Outcome:
    """Try one file; `folder` is empty."""
    config = decoded(config)
    try:
        decoder = read_spec(text_part(config))
    except LoadError as error:
        return Outcome("refused", str(error))
    if not decoder.generates:
        return Outcome("starts", "a model that only pools, which tests/models/encoders compares")
    small = shrunk(config)
    prompt = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7))
    try:
        model = _theirs(small)
        if model is None:
            return Outcome("starts", "transformers does not have the class")
        with torch.no_grad():
            expected = judge_of(model)(prompt[None], use_cache=False).logits[0].float()
    except Exception as error:  # each class refuses in its own way
        return Outcome("starts", f"transformers: {type(error).__name__}: {error}"[:160])
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(small))
    found = run_full(load(folder, read_spec(read_config(folder)), max_model_len=64), [prompt])
    error = relative_error(found, [expected])
    if "activation_sparsity_pattern" in text_part(small):
        error /= 50  # a value near the threshold is kept or not by its last bits
    return Outcome("equal") if error < TOLERANCE else Outcome("differs", f"{error:.1e}")


def _theirs(small: dict[str, Any]) -> Any:
    """transformers' model of a small config with random weights; None where it has no class."""
    names = list(small["architectures"])
    part = text_part(small)
    if PART in part and not hasattr(transformers, names[0]):
        small, names = {k: v for k, v in part.items() if k != PART}, list(part["architectures"])
    kind = small.get("model_type")
    if kind not in CONFIG_MAPPING or PART not in part:
        reference = reference_of(names, kind)
        kind = None if reference is None else reference.kind
    if kind is None:
        return None
    rope = small.get("rope_scaling") or {}
    if "attn_factor" in rope:  # which vLLM reads, and transformers does not
        factor = rope["attn_factor"] * (0.1 * math.log(rope["factor"]) + 1.0)
        small = {**small, "rope_scaling": {**rope, "attention_factor": factor}}
    config = CONFIG_MAPPING[kind].from_dict({**small, "model_type": kind})
    config._attn_implementation = "eager"
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    torch.manual_seed(0)
    if name is not None and name in names:
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = getattr(transformers, names[0])(config)
    with torch.no_grad():
        for key, value in model.named_parameters():
            is_norm = "norm" in key and value.dim() == 1
            value.copy_(torch.randn_like(value) * 0.1 + (1.0 if is_norm else 0.0))
    return model.eval().float()
