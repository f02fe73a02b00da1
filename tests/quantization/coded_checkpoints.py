"""Writes checkpoints whose linear layers are quantised, in the layouts of AWQ, GPTQ and
compressed-tensors, from what those formats say of one weight at a time. Shares nothing with the
reader; beside each it leaves the same weights in plain numbers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray
LAYERS = re.compile(r".*\.layers\.\d+\..*proj\.weight|.*\.experts\.\d+\.w\d\.weight")
"""Names of the weights that are quantised."""


@dataclass(frozen=True)
class Numbers:
    """A weight [out, in] as q of `bits` bits, scales and zeros [out, G], each input's group."""

    bits: int
    q: Array
    scales: Array
    zeros: Array
    index: Array

    def plain(self) -> torch.Tensor:
        """The weight: (q - zero) * scale, number by number."""
        zeros, scales = self.zeros[:, self.index], self.scales[:, self.index]
        return torch.from_numpy(((self.q - zeros) * scales).astype(np.float32))


def numbers_of(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, reorders: bool, seed: int
) -> Numbers:
    """Round to nearest; groups are of neighbours, or of inputs that were shuffled."""
    rng = np.random.default_rng(seed)
    w = weight.double().numpy()
    outputs, inputs = w.shape
    order = rng.permutation(inputs) if reorders else np.arange(inputs)
    groups = 1 if group == -1 else -(-inputs // group)
    index = np.empty(inputs, np.int64)
    index[order] = np.arange(inputs) // (inputs if group == -1 else group)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    q, scales = np.empty((outputs, inputs), np.int64), np.empty((outputs, groups))
    zeros = np.full((outputs, groups), middle)
    for g in range(groups):
        own = w[:, index == g]
        low, high = own.min(1), own.max(1)
        if symmetric:
            scale = np.maximum(-low, high) / (middle - 0.5)
        else:
            scale = (high - low) / most
        scales[:, g] = scale.astype(np.float16)
        if not symmetric:
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 0, most)
        found = np.round(own / scales[:, g, None]) + zeros[:, g, None]
        q[:, index == g] = np.clip(found, 0, most)
    return Numbers(bits, q, scales, zeros, index)


def words(fields: Array, bits: int) -> Array:
    """Fields [*, n] in words of 32 bits along the last axis, the first in the lowest bits."""
    per = 32 // bits
    padded = np.zeros((*fields.shape[:-1], -(-fields.shape[-1] // per) * per), np.uint64)
    padded[..., : fields.shape[-1]] = fields
    out = np.zeros((*fields.shape[:-1], padded.shape[-1] // per), np.uint64)
    for i in range(per):
        out |= padded[..., i::per] << np.uint64(bits * i)
    return out.astype(np.uint32).view(np.int32)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def awq_tensors(n: Numbers) -> dict[str, torch.Tensor]:
    """Eight columns of a word lie in this order, the first in the lowest bits."""
    shuffle = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(fields: Array) -> torch.Tensor:
        shuffled = fields.reshape(len(fields), -1, 8)[..., shuffle].reshape(fields.shape)
        return _tensor(words(shuffled, 4))

    return {
        "qweight": packed(n.q.T),
        "qzeros": packed(n.zeros.T),
        "scales": _tensor(n.scales.T).half(),
    }


def gptq_tensors(n: Numbers, version: int = 1) -> dict[str, torch.Tensor]:
    """The first version stores zero points less one, subtracted from whole words."""
    zeros = words(n.zeros.T, n.bits).view(np.uint32)
    if version == 1:
        zeros = zeros - np.uint32(0x11111111 if n.bits == 4 else 0x01010101)
    return {
        "qweight": _tensor(words(n.q, n.bits).T),
        "qzeros": _tensor(zeros.view(np.int32)),
        "scales": _tensor(n.scales.T).half(),
        "g_idx": _tensor(n.index.astype(np.int32)),
    }


def compressed_tensors(n: Numbers, *, symmetric: bool, reorders: bool) -> dict[str, torch.Tensor]:
    """Signed numbers are stored with half of the range added, which they have here."""
    found = {
        "weight_packed": _tensor(words(n.q, n.bits)),
        "weight_scale": _tensor(n.scales).half(),
        "weight_shape": torch.tensor(n.q.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = _tensor(words(n.zeros.T, n.bits).T)
    if reorders:
        found["weight_g_idx"] = _tensor(n.index.astype(np.int32))
    return found


@dataclass(frozen=True)
class Written:
    """A way to write: bits, groups and kind, a module's tensors, `quantization_config`."""

    tensors: Callable[[Numbers], dict[str, torch.Tensor]]
    config: dict[str, Any]
    bits: int = 4
    group: int = 16
    symmetric: bool = False
    reorders: bool = False

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight, and the weight that they stand for."""
        numbers = numbers_of(
            weight,
            self.bits,
            self.group,
            symmetric=self.symmetric,
            reorders=self.reorders,
            seed=weight.shape[1],  # and so one order for all weights with as many inputs
        )
        return self.tensors(numbers), numbers.plain()


def awq(group: int = 16) -> Written:
    """Four bits with zero points, groups of neighbours."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": None}
    return Written(awq_tensors, config, group=group)


def gptq(
    version: int, bits: int = 4, group: int = 16, symmetric: bool = False, reorders: bool = False
) -> Written:
    """One of the two versions of the format; group -1: all inputs."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": reorders,
        "sym": symmetric,
        "damp_percent": 0.1,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    tensors = lambda n: gptq_tensors(n, version)  # noqa: E731
    return Written(tensors, config, bits, group, symmetric, reorders)


def compressed(
    bits: int = 4, group: int = 16, symmetric: bool = True, reorders: bool = False
) -> Written:
    """W4A16 or W8A16; group -1: all inputs."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "dynamic": False,
        "actorder": "group" if reorders else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"],
        "kv_cache_scheme": None,
    }
    tensors = lambda n: compressed_tensors(n, symmetric=symmetric, reorders=reorders)  # noqa: E731
    return Written(tensors, config, bits, group, symmetric, reorders)


FORMATS: dict[str, Written] = {
    "awq": awq(),
    "gptq-v1": gptq(1),
    "gptq-v1-symmetric-act_order": gptq(1, symmetric=True, reorders=True),
    "gptq-v2-act_order": gptq(2, reorders=True),
    "gptq-v2-8bit-channel": gptq(2, bits=8, group=-1),
    "compressed-w4a16": compressed(),
    "compressed-w4a16-asymmetric-act_order": compressed(symmetric=False, reorders=True),
    "compressed-w8a16": compressed(bits=8),
    "compressed-w8a16-channel-asymmetric": compressed(bits=8, group=-1, symmetric=False),
}


class How(Protocol):
    """A way to write a checkpoint."""

    @property
    def config(self) -> dict[str, Any]: ...
    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]: ...


def write(source: Path, target: Path, how: How, names: re.Pattern[str] = LAYERS) -> Path:
    """Write the checkpoint `source` quantised to `target`, and with the same weights in plain
    numbers to the folder that is returned. Projections that make one product have one order.
    """
    plain = target / "plain"
    for folder in (target, plain):
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.glob("*.json"):
            shutil.copy(file, folder / file.name)
    tensors = load_file(source / "model.safetensors")
    coded, values = dict(tensors), dict(tensors)
    for name in filter(names.fullmatch, tensors):
        parts, values[name] = how.made(coded.pop(name))
        coded |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    save_file(coded, target / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": how.config}))
    return plain
