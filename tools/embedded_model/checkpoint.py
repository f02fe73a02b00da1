"""The checkpoint folder: what is written for transformers and Quire, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from embedded_model.model import Model, ModelShape
from embedded_model.tokenizer import BEGIN, CHAT_TEMPLATE, END


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write what transformers and Quire load: bf16 weights, tokenizer, configuration, template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    write_json(folder / "config.json", llama_config(model.shape) | ids)
    write_json(folder / "generation_config.json", ids)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.shape.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def llama_config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def parts(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Name every tensor as Llama checkpoints do; merged projections come as views."""
    shape = model.shape
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    yield "model.embed_tokens.weight", model.embedding.data
    yield "model.norm.weight", model.norm.data
    for index, layer in enumerate(model.layers):
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        named = list(zip(names, layer.qkv.data.split([q, kv, kv]), strict=True))
        named += zip(["mlp.gate_proj", "mlp.up_proj"], layer.gate_up.data.chunk(2), strict=True)
        named += [("self_attn.o_proj", layer.out.data), ("mlp.down_proj", layer.down.data)]
        named += [("input_layernorm", layer.attention_norm.data)]
        named += [("post_attention_layernorm", layer.mlp_norm.data)]
        for name, tensor in named:
            yield f"model.layers.{index}.{name}.weight", tensor


def hub_tensors(model: Model) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in parts(model)}


def load_model(folder: Path) -> Model:
    """Load an exported folder into the training model, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Model(ModelShape(**{name: config[name] for name in asdict(ModelShape())}))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in parts(model):
        tensor.copy_(tensors.pop(name))
    assert not tensors, f"left over: {sorted(tensors)}"
    return model.requires_grad_(False)
