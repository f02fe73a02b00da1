"""Model folders of draft networks with random weights, in the layouts that there are."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

HEADS, KV_HEADS, HEAD_DIM, FFN = 4, 2, 16, 72


def layer_config(target, dim, **keys):
    """Keys of config.json for one Llama layer of `dim` numbers over the vocabulary of a target."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "rope_theta": 5e3,
        "max_position_embeddings": target["max_position_embeddings"],
        "vocab_size": target["vocab_size"],
        "tie_word_embeddings": False,
    } | keys


class Draw:
    """Random tensors; norms are near one, matrices keep magnitudes."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows, columns):
        return torch.randn(rows, columns, generator=self.generator) / columns**0.5

    def norm(self, size):
        return 1 + 0.3 * torch.randn(size, generator=self.generator)

    def layer(self, at, dim, inputs):
        """The tensors of a Llama layer whose attention reads `inputs` numbers."""
        heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = {"q": (heads, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (dim, heads)}
        tensors = {f"{at}self_attn.{p}_proj.weight": self.matrix(*s) for p, s in shapes.items()}
        for part, shape in {"gate": (FFN, dim), "up": (FFN, dim), "down": (dim, FFN)}.items():
            tensors[f"{at}mlp.{part}_proj.weight"] = self.matrix(*shape)
        tensors[f"{at}post_attention_layernorm.weight"] = self.norm(dim)
        return tensors


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder):
    """config.json and tensors of a model folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def write_eagle(folder, target_folder, *, seed=1, bias=False):
    """An EAGLE network with the target's embedding and head."""
    target = json.loads((target_folder / "config.json").read_text())
    draw, dim = Draw(seed), target["hidden_size"]
    tensors = {"fc.weight": draw.matrix(dim, 2 * dim), **draw.layer("layers.0.", dim, dim)}
    if bias:
        tensors["fc.bias"] = 0.3 * draw.matrix(1, dim)[0]
    return write(folder, layer_config(target, dim), tensors)


def write_eagle3(
    folder, target_folder, *, layout="original", vocab=None, dim=None, layers=None, seed=2, **facts
):
    """An EAGLE-3 network of `dim` numbers (the target's: its embedding is shared) over `vocab` of
    the target's ids, which reads states before `layers`.
    """
    target = json.loads((target_folder / "config.json").read_text())
    draw, width = Draw(seed), target["hidden_size"]
    dim = dim or width
    at = "midlayer." if layout == "original" else "layers.0."
    tensors = {"fc.weight": draw.matrix(dim, 3 * width), **draw.layer(at, dim, 2 * dim)}
    for name in (at + "hidden_norm", at + "input_layernorm", "norm"):
        tensors[name + ".weight"] = draw.norm(dim)
    if facts.get("norm_before_fc"):
        tensors["input_norm.weight"] = draw.norm(3 * width)
    if dim != width:
        tensors["embed_tokens.weight"] = draw.matrix(target["vocab_size"], dim)
    tensors["lm_head.weight"] = draw.matrix(vocab or target["vocab_size"], dim)
    if vocab:
        chosen = torch.randperm(target["vocab_size"], generator=draw.generator)[:vocab].sort()[0]
        tensors["d2t"] = chosen - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(target["vocab_size"], dtype=torch.bool)
        tensors["t2d"][chosen] = True
    config, own = layer_config(target, dim), dict(facts)
    if vocab:
        own["draft_vocab_size"] = vocab
    if layout == "original":
        own["architectures"] = ["LlamaForCausalLMEagle3"]
        if layers:
            own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
        return write(folder, config | own, tensors)
    if layers:
        own["eagle_aux_hidden_state_layer_ids"] = layers
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "transformer_layer_config": config,
        "speculators_config": {
            "algorithm": "eagle3", "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(target_folder)},
        },
    } | own  # fmt: skip
    return write(folder, config, tensors)


def write_medusa(folder, target_folder, *, heads=4, blocks=2, layout="vllm", vocab=None, seed=3):
    """Medusa heads; in the authors' layout with biases, in vLLM's over `vocab` ids, if given."""
    target = json.loads((target_folder / "config.json").read_text())
    draw, dim, size = Draw(seed), target["hidden_size"], vocab or target["vocab_size"]
    tensors, config = {}, {}
    for head in range(heads):
        for block in range(blocks):
            matrix = draw.matrix(dim, dim)
            if layout == "vllm":
                tensors[f"blocks.{head}.layers.{block}.weight"] = matrix
                continue
            tensors[f"{head}.{block}.linear.weight"] = matrix
            tensors[f"{head}.{block}.linear.bias"] = draw.matrix(1, dim)[0]
        at = f"lm_heads.{head}" if layout == "vllm" else f"{head}.{blocks}"
        tensors[at + ".weight"] = draw.matrix(size, dim)
    if layout != "vllm":
        config = {"medusa_num_heads": heads, "medusa_num_layers": blocks}
        return write(folder, config | {"base_model_name_or_path": "target"}, tensors)
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": dim}
    config |= {"num_heads": heads, "num_hidden_layers": blocks, "vocab_size": target["vocab_size"]}
    if vocab:
        config["truncated_vocab_size"] = vocab
        ids = torch.randperm(target["vocab_size"], generator=draw.generator)[:vocab]
        tensors["token_map"] = ids
    return write(folder, config, tensors)
