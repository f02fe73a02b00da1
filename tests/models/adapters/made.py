"""Adapters as PEFT stores them, and the same changes in the weights of transformers' models."""

import json
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

RANK, ALPHA = 4, 6.0
PREFIX = "base_model.model."


@dataclass
class HandMade:
    """Tensors by their names in the file, and keys of the config that differ."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, folder / SAFETENSORS)
        config = {
            "peft_type": "LORA",
            "peft_version": "0.21.2",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": [],
            **self.config,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder


SAFETENSORS = "adapter_model.safetensors"


def adapted(model, seed=0, whole=(), can_be=lambda name: True):
    """Adapt every linear module, table and stack of experts of a model of transformers that can be,
    by its name, and replace the modules named `whole`: its weights change in place. Returns the
    adapter.
    """
    made, generator = HandMade(), torch.Generator().manual_seed(seed)
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = tables[1] is not None and tables[0].weight is tables[1].weight
    for name, module in list(model.named_modules()):
        if "shared_transformer" in name or not can_be(name):
            continue
        if name in whole:
            _replace(made, name, module, generator)
        elif tied and any(module is table for table in tables):
            continue
        elif isinstance(module, torch.nn.Linear | Conv1D):
            _adapt_linear(made, name, module, generator)
        elif module is model.get_input_embeddings():
            _adapt_table(made, name, module, generator)
        elif name.endswith((".router", ".gate", ".router.gate")) and hasattr(module, "weight"):
            _adapt_linear(made, name, module, generator)
        elif "experts" in name.split(".")[-1:]:
            _adapt_experts(made, name, module, generator)
    return made


def pair(generator, rows, columns, rank=RANK, size=0.1):
    """A [rank, columns] and B [rows, rank], with a product that shows."""
    a = torch.randn(rank, columns, generator=generator) * size
    return a, torch.randn(rows, rank, generator=generator) * size


def _replace(made, name, module, generator):
    for part, weight in module.named_parameters(recurse=False):
        new = torch.randn(weight.shape, generator=generator) * weight.std()
        made.tensors[f"{PREFIX}{name}.{part}"] = new
        weight.data.copy_(new)


def _adapt_linear(made, name, module, generator):
    weight = module.weight.data
    is_transposed = isinstance(module, Conv1D)
    rows, columns = weight.shape[::-1] if is_transposed else weight.shape
    a, b = pair(generator, rows, columns)
    made.tensors[f"{PREFIX}{name}.lora_A.weight"] = a
    made.tensors[f"{PREFIX}{name}.lora_B.weight"] = b
    change = ALPHA / RANK * (b @ a)
    weight += change.T if is_transposed else change


def _adapt_table(made, name, module, generator):
    a, b = pair(generator, *module.weight.shape[::-1])
    made.tensors[f"{PREFIX}{name}.lora_embedding_A"] = a
    made.tensors[f"{PREFIX}{name}.lora_embedding_B"] = b
    module.weight.data += ALPHA / RANK * (b @ a).T


def _adapt_experts(made, name, module, generator):
    stacks = [(n, p) for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
    wrapped = name + ".base_layer" * (len(stacks) - 1)
    for _, parameter in stacks:
        experts, *shape = parameter.shape
        columns, rows = shape if getattr(module, "is_transposed", False) else shape[::-1]
        a, b = pair(generator, rows, columns, RANK * experts)
        made.tensors[f"{PREFIX}{wrapped}.lora_A.weight"] = a
        made.tensors[f"{PREFIX}{wrapped}.lora_B.weight"] = b
        for e in range(experts):
            change = ALPHA / RANK * (b[:, e::experts] @ a[e * RANK : (e + 1) * RANK])
            parameter.data[e] += change.T if getattr(module, "is_transposed", False) else change
        wrapped = wrapped.removesuffix(".base_layer")


def make_adapter(folder, checkpoint, seed):
    """An adapter of every projection in a checkpoint."""
    made, generator = HandMade(), torch.Generator().manual_seed(seed)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or "embed" in name or module.endswith(("wte", "wpe")):
            continue
        rows, columns = weight.shape[::-1] if "c_" in name else weight.shape
        a, b = pair(generator, rows, columns, size=0.3)
        made.tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        made.tensors[f"{PREFIX}{module}.lora_B.weight"] = b
    assert len(made.tensors) > 8
    return made.save(folder)
