"""Families that transformers does not have, written out plainly: one prompt, every token at once,
no cache. Each makes an oracle from config.json and the tensors as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]
Oracle = Callable[[torch.Tensor], torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, C] over its root mean square, times weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def angles(length: int, theta: float, dim: int) -> torch.Tensor:
    """Radians [T, dim / 2]."""
    powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return torch.outer(torch.arange(length, dtype=torch.float32), 1 / theta**powers)


def turn_halves(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, H, D] with value i and value i + D / 2 rotated as a pair."""
    turns = angles(len(x), theta, x.shape[-1])[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()), -1)


def turn_neighbours(x: torch.Tensor, theta: float, dim: int) -> torch.Tensor:
    """x [T, H, D] with the first `dim` values rotated, in pairs of neighbours."""
    turns = angles(len(x), theta, dim)[:, None]
    a, b = x[..., 0:dim:2], x[..., 1:dim:2]
    pairs = (a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin())
    return torch.cat((torch.stack(pairs, -1).flatten(-2), x[..., dim:]), -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q [T, H, D] over k and v [T, K, D] -> [T, H * D]."""
    length, heads, dim = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """The product with a stored weight, and its bias where there is one."""
    return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))


def heads_of(c: Config) -> tuple[int, int, int]:
    """H, K and D of a config in Llama's words."""
    heads = c["num_attention_heads"]
    return heads, c["num_key_value_heads"], c["hidden_size"] // heads


def internlm2(c: Config, w: Weights) -> Oracle:
    """wqkv holds, for each key/value head, its queries, its key and its value."""
    heads, kv_heads, dim = heads_of(c)

    def layer(x: torch.Tensor, at: str) -> torch.Tensor:
        h = rms(x, w[at + "attention_norm.weight"], c["rms_norm_eps"])
        qkv = linear(w, at + "attention.wqkv", h).view(len(x), kv_heads, -1, dim)
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        q, k = (turn_halves(t, c["rope_theta"]) for t in (q, k))
        x = x + linear(w, at + "attention.wo", attend(q, k, v))
        h = rms(x, w[at + "ffn_norm.weight"], c["rms_norm_eps"])
        gate, up = (linear(w, f"{at}feed_forward.{n}", h) for n in ("w1", "w3"))
        return x + linear(w, at + "feed_forward.w2", F.silu(gate) * up)

    def ask(ids: torch.Tensor) -> torch.Tensor:
        x = w["model.tok_embeddings.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            x = layer(x, f"model.layers.{i}.")
        return linear(w, "output", rms(x, w["model.norm.weight"], c["rms_norm_eps"]))

    return ask


def minicpm(c: Config, w: Weights) -> Oracle:
    """Llama with embeddings times scale_emb, sub-layers times scale_depth / sqrt(L), and the last
    hidden state divided by hidden_size / dim_model_base.
    """
    heads, kv_heads, dim = heads_of(c)
    scale = c["scale_depth"] / c["num_hidden_layers"] ** 0.5

    def layer(x: torch.Tensor, at: str) -> torch.Tensor:
        h = rms(x, w[at + "input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (linear(w, f"{at}self_attn.{n}_proj", h).view(len(x), -1, dim) for n in "qkv")
        q, k = (turn_halves(t, c["rope_theta"]) for t in (q, k))
        x = x + scale * linear(w, at + "self_attn.o_proj", attend(q, k, v))
        h = rms(x, w[at + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = (linear(w, f"{at}mlp.{n}_proj", h) for n in ("gate", "up"))
        return x + scale * linear(w, at + "mlp.down_proj", F.silu(gate) * up)

    def ask(ids: torch.Tensor) -> torch.Tensor:
        table = w["model.embed_tokens.weight"]
        x = table[ids] * c["scale_emb"]
        for i in range(c["num_hidden_layers"]):
            x = layer(x, f"model.layers.{i}.")
        x = rms(x, w["model.norm.weight"], c["rms_norm_eps"])
        return F.linear(x / (c["hidden_size"] / c["dim_model_base"]), table)

    assert heads * dim == c["hidden_size"] and heads % kv_heads == 0
    return ask


def chatglm(c: Config, w: Weights) -> Oracle:
    """q, k and v one after the other in one tensor, gate and up in another; half of each head
    rotated with a base of 10000 * rope_ratio.
    """
    heads, kv_heads = c["num_attention_heads"], c["multi_query_group_num"]
    dim, eps, theta = c["kv_channels"], c["layernorm_epsilon"], 1e4 * c["rope_ratio"]

    def layer(x: torch.Tensor, at: str) -> torch.Tensor:
        h = rms(x, w[at + "input_layernorm.weight"], eps)
        qkv = linear(w, at + "self_attention.query_key_value", h).view(len(x), -1, dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        q, k = (turn_neighbours(t, theta, dim // 2) for t in (q, k))
        x = x + linear(w, at + "self_attention.dense", attend(q, k, v))
        h = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = linear(w, at + "mlp.dense_h_to_4h", h).chunk(2, -1)
        return x + linear(w, at + "mlp.dense_4h_to_h", F.silu(gate) * up)

    def ask(ids: torch.Tensor) -> torch.Tensor:
        x = w["transformer.embedding.word_embeddings.weight"][ids]
        for i in range(c["num_layers"]):
            x = layer(x, f"transformer.encoder.layers.{i}.")
        x = rms(x, w["transformer.encoder.final_layernorm.weight"], eps)
        return linear(w, "transformer.output_layer", x)

    return ask


def exaone(c: Config, w: Weights) -> Oracle:
    """Llama with the names of GPT-2: c_fc_0 is the gate, c_fc_1 the other factor."""
    _, _, dim = heads_of(c)
    eps = c["layer_norm_epsilon"]

    def layer(x: torch.Tensor, at: str) -> torch.Tensor:
        attn = at + "attn.attention."
        h = rms(x, w[at + "ln_1.weight"], eps)
        q, k, v = (linear(w, f"{attn}{n}_proj", h).view(len(x), -1, dim) for n in "qkv")
        q, k = (turn_halves(t, c["rope_theta"]) for t in (q, k))
        x = x + linear(w, attn + "out_proj", attend(q, k, v))
        h = rms(x, w[at + "ln_2.weight"], eps)
        gate, up = (linear(w, f"{at}mlp.c_fc_{n}", h) for n in (0, 1))
        return x + linear(w, at + "mlp.c_proj", F.silu(gate) * up)

    def ask(ids: torch.Tensor) -> torch.Tensor:
        x = w["transformer.wte.weight"][ids]
        for i in range(c["num_layers"]):
            x = layer(x, f"transformer.h.{i}.")
        return linear(w, "lm_head", rms(x, w["transformer.ln_f.weight"], eps))

    return ask


def step3p5(c: Config, w: Weights) -> Oracle:
    """The text model of Step-3.7 in transformers, and a head."""
    names = {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
    }
    config = Step3p7TextConfig(**{names.get(k, k): v for k, v in c.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = Step3p7TextModel(config).eval().float()
    own = {k.removeprefix("model."): v for k, v in w.items() if k != "lm_head.weight"}
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}."
        if at + "moe.gate.weight" not in own:
            continue
        gate, up = (own.pop(f"{at}moe.{part}_proj.weight") for part in ("gate", "up"))
        own[at + "mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        own[at + "mlp.experts.down_proj"] = own.pop(at + "moe.down_proj.weight")
        own[at + "mlp.gate.weight"] = own.pop(at + "moe.gate.weight")
        own[at + "mlp.gate.e_score_correction_bias"] = own.pop(at + "moe.router_bias")
        for part in ("gate", "up", "down"):
            name = f"{part}_proj.weight"
            own[f"{at}mlp.shared_experts.{name}"] = own.pop(f"{at}share_expert.{name}")
    missing, unknown = model.load_state_dict(own, strict=False)
    assert not unknown and all("inv_freq" in name for name in missing)

    @torch.no_grad()
    def ask(ids: torch.Tensor) -> torch.Tensor:
        hidden = model(ids[None], use_cache=False).last_hidden_state[0]
        return F.linear(hidden, w["lm_head.weight"])

    return ask
