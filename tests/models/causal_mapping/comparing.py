"""A name of transformers' causal mapping, tiny and random: whose code runs it, and its logits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.errors import LoadError
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.foreign.implementation import choose_implementation, describe_model
from quire.models.foreign.load import load_foreign_model
from quire.ops import select
from quire.runner.devices.device import CpuDevice
from tests.models.causal_mapping.tiny import LENGTH, VOCAB, TooLarge, checkpoint, config_of
from tests.models.hostile.form import Hostile
from tests.models.hostile.models import HOSTILE, make
from tests.models.paged_driver import load, relative_error, run_chunked

Kind = Literal["native", "fallback", "refused"]
_LENGTHS = (23, 9)
_TOLERANCE = 1e-4
"""On errors in float32; models without norms after their parts have more than others."""


_DESCRIBED: dict[str | None, list[Hostile]] = {}
"""Small models of names that have a family, which the tests of families compare as well."""
for _hostile in HOSTILE.values():
    _name = _hostile.architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(_hostile.kind)
    _DESCRIBED.setdefault(_name, []).append(_hostile)


@dataclass(frozen=True)
class Outcome:
    """`kind` says whose code runs it; `error` is the largest difference of logits from those of
    transformers, relative to the largest logit; `why` it is refused, or not compared here.
    """

    kind: Kind
    error: float | None = None
    why: str = ""
    through_transformers: float | None = None
    """The same error where a name with a family runs through transformers' code."""

    @property
    def is_equal(self) -> bool:
        return self.error is not None and self.error < _TOLERANCE


def names() -> list[str]:
    return list(dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def outcome_of(name: str, folder: Path, implementation: str = "auto") -> Outcome:
    """Try one name; `folder` is empty. Logits are computed in chunks among those of other rows."""
    if implementation == "auto" and name in _DESCRIBED:
        each = enumerate(_DESCRIBED[name])
        return Outcome("native", max(_error_of(hostile, folder / str(i)) for i, hostile in each))
    try:
        written = config_of(name).to_dict() | {"architectures": [name]}
        (folder / "config.json").write_text(json.dumps(written))
        config = read_config(folder)
        chosen, _ = choose_implementation(config, implementation)
        spec = describe_model(config, chosen)
    except LoadError as error:
        return Outcome("refused", why=str(error))
    kind: Kind = "native" if chosen == "quire" else "fallback"
    try:
        ask = checkpoint(name, folder)
    except (TooLarge, ImportError) as error:  # parts for pictures may need other packages
        return Outcome(kind, why=" ".join(str(error).split()))
    config = read_config(folder)
    try:
        spec = describe_model(config, chosen)
        ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
        if chosen == "quire":
            model: Any = load(folder, spec, max_model_len=LENGTH)
        else:
            model = load_foreign_model(folder, config, ops, dtype=torch.float32, device=CpuDevice())
    except LoadError as error:
        return Outcome("refused", why=str(error))
    texts = prompts()
    expected = [ask(text) for text in texts]
    return Outcome(kind, _worst(model, texts, expected))


def _error_of(hostile: Hostile, folder: Path) -> float:
    made = make(hostile, folder)
    model = load(folder, read_spec(read_config(folder)), max_model_len=made.max_model_len)
    return _worst(model, made.prompts, made.logits)


def prompts() -> list[torch.Tensor]:
    """Texts longer than windows and selections of the tiny models."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in _LENGTHS]


def _worst(model: Any, texts: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return relative_error(run_chunked(model, texts), expected)
