"""Tiny random models of every family as published, and their oracle: transformers, or ours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.models import find_family, read_spec
from quire.models.rules import tensor_map
from tests.models.hostile.dense import DENSE
from tests.models.hostile.first import FIRST
from tests.models.hostile.form import Hostile, Oracle
from tests.models.hostile.gemma import GEMMA
from tests.models.hostile.latent import LATENTS
from tests.models.hostile.later import LATER
from tests.models.hostile.mixtures import MIXTURES
from tests.models.hostile.state import STATE

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TEXT = "text"
"""The folder of a text part by itself."""
BY_ONE_MORE = (
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "nemotron", "step3p5"),
    "minimax_m3_vl_text",
)
"""Their norms multiply with 1 + weight."""

HOSTILE: dict[str, Hostile] = FIRST | DENSE | MIXTURES | LATENTS | STATE | GEMMA | LATER
"""Each of the tests takes all of them; those that are not `is_default` with `--full` only. For each
kind of fact (kinds.py) there is one that is.
"""


def cases(names: Iterable[str] = HOSTILE) -> list[Any]:
    """The models as parameters of a test."""
    return [
        pytest.param(name, marks=[] if HOSTILE[name].is_default else [pytest.mark.full])
        for name in names
    ]


_EYES = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 8,
}


@dataclass(frozen=True)
class Made:
    """A checkpoint in float32, and what the oracle makes of `prompts` with it."""

    folder: Path
    prompts: list[torch.Tensor]
    logits: list[torch.Tensor]
    max_model_len: int


class Library:
    """Makes each checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Made] = {}

    def __getitem__(self, name: str) -> Made:
        if name not in self._made:
            self._made[name] = make(HOSTILE[name], self._folder / name)
        return self._made[name]


def make(hostile: Hostile, folder: Path) -> Made:
    """Write the checkpoint and ask the oracle."""
    write(hostile, folder)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 96, (n,), generator=generator) for n in (23, 9, 14)]
    ask = oracle(hostile, folder)
    return Made(folder, prompts, [ask(p) for p in prompts], hostile.max_model_len)


def write(hostile: Hostile, folder: Path) -> None:
    if hostile.reference is not None:
        write_random(hostile, folder)
        return
    random_model(hostile).save_pretrained(folder)
    if hostile.part_of is not None:
        write_as_part(hostile.part_of, folder)
    if hostile.architecture is not None and hostile.whole is None:
        rename(folder, hostile.architecture)


def oracle(hostile: Hostile, folder: Path) -> Oracle:
    """What the made checkpoint is compared with."""
    if hostile.reference is not None:
        config = json.loads((folder / "config.json").read_text())
        return hostile.reference(config, load_file(folder / "model.safetensors"))
    model = theirs(hostile, folder)

    @torch.no_grad()
    def ask(ids: torch.Tensor) -> torch.Tensor:
        return model(ids[None], use_cache=False).logits[0].float()

    return ask


def theirs(hostile: Hostile, folder: Path) -> torch.nn.Module:
    """The checkpoint as transformers loads it."""
    return (
        class_of(hostile)
        .from_pretrained(
            folder if hostile.part_of is None else folder / TEXT,
            dtype=torch.float32,
            attn_implementation=hostile.attention,
        )
        .eval()
    )


def _learned_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Weights that transformers keeps as buffers."""
    names = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    return [(n, b) for n, b in model.named_buffers() if n.endswith(names)]


def class_of(hostile: Hostile) -> Any:
    """transformers' class, which not every text model has in its table of causal models."""
    if hostile.whole is not None:
        return getattr(transformers, hostile.whole)
    if hostile.kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    assert hostile.architecture is not None, "a class that is named"
    return getattr(transformers, hostile.architecture)


def random_model(hostile: Hostile) -> torch.nn.Module:
    """The model as transformers makes it, with weights that leave nothing at one or zero."""
    config = AutoConfig.for_model(hostile.kind, **keys_of(hostile), attn_implementation="eager")
    torch.manual_seed(hostile.seed)
    model = class_of(hostile)
    if hostile.whole is not None:
        config = model.config_class(
            text_config=config.to_dict(), vision_config=_EYES, attn_implementation="eager"
        )
    model = model.from_config(config) if model is AutoModelForCausalLM else model(config)
    model = model.eval().float()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *_learned_buffers(model)]:
            value.copy_(torch.randn_like(value) * 0.15 + centre(hostile, name))
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = torch.rand(len(table), hostile.keys["n_routed_experts"])
                table.copy_(experts.topk(table.shape[1]).indices)
    return model


def write_random(hostile: Hostile, folder: Path) -> None:
    """A checkpoint of a family that transformers does not have."""
    config = config_of(hostile)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        stored.name: torch.randn(stored.shape, generator=generator) * 0.15
        + centre(hostile, stored.name)
        for stored in tensor_map(find_family(config), read_spec(config))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(hostile: Hostile) -> dict[str, Any]:
    """A config.json with just these keys."""
    name = hostile.architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hostile.kind]
    return {"model_type": hostile.kind, "architectures": [name], **keys_of(hostile)}


def keys_of(hostile: Hostile) -> dict[str, Any]:
    """The keys of config.json; None takes one of the base away."""
    keys = {k: v for k, v in {**hostile.base, **hostile.keys}.items() if v is not None}
    return keys | dict.fromkeys(hostile.nulls)


def write_as_part(architecture: str, folder: Path) -> None:
    """Move the checkpoint to a folder of its own, and store it as the text part of a whole."""
    files = list(folder.iterdir())
    (folder / TEXT).mkdir()
    for file in files:
        file.rename(folder / TEXT / file.name)
    config = json.loads((folder / TEXT / "config.json").read_text())
    whole = {"architectures": [architecture], "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": config}))
    text = load_file(folder / TEXT / "model.safetensors")
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in text.items()}
    tensors["model.vision_tower.layers.0.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rename(folder: Path, architecture: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": [architecture]}))


def centre(hostile: Hostile, name: str) -> float:
    """The mean of a tensor: norms by 1 + weight are centred like all others."""
    if name.endswith(("layer_scalar", "scale")):
        return 1.0
    own = ".".join(name.split(".")[-3:-1])  # DBRX has its attention in a module of norms
    is_norm = ("norm" in own or "ln_" in own) and name.endswith("weight")
    return 1.0 if is_norm and hostile.kind not in BY_ONE_MORE else 0.0
