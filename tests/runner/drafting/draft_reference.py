"""Draft networks over whole sequences in float64, from their tensors: what the engine's are
compared with. The target's hidden states come from transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.runner.drafting.draft_checkpoints import HEAD_DIM, HEADS, KV_HEADS


class Reference:
    """One kind of network. `states` [T, n*C] float64 of a prompt's tokens come from the target."""

    def __init__(self, config, tensors, embedding, head):
        """embedding [V, C] and head [V, C] are the target's."""
        self.c = config.get("transformer_layer_config", config)
        self.config = config
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.head = self.w.get("lm_head.weight", head.double())

    def drafts(self, ids, states, count):
        """The `count` likeliest tokens after `ids` [N], given the states of the first N-1."""
        e, x = self.embedding[ids[1:]], self.enter(states)
        found = []
        for _ in range(count):
            scores, own = self.run(e, x)
            token = int(scores[-1].argmax())
            token += int(self.w["d2t"][token]) if "d2t" in self.w else 0
            found.append(token)
            e = torch.cat([e, self.embedding[token][None]])
            x = torch.cat([x, own[-1:]])
        return found

    def enter(self, states):
        return states

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.w[name]

    @property
    def eps(self):
        return self.c["rms_norm_eps"]

    def attention(self, h, at):
        q, k, v = (h @ self.w[f"{at}self_attn.{part}_proj.weight"].T for part in "qkv")
        q, k, v = (
            t.view(len(h), heads, HEAD_DIM).transpose(0, 1)
            for t, heads in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
        )
        k, v = self.rotated(k), v
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
        y = F.scaled_dot_product_attention(self.rotated(q), k, v, is_causal=True)
        return y.transpose(0, 1).flatten(1) @ self.w[f"{at}self_attn.o_proj.weight"].T

    def rotated(self, x):
        half = HEAD_DIM // 2
        steps = self.c["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * steps
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def mlp(self, x, at):
        h = self.norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ self.w[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.w[at + "mlp.down_proj.weight"].T


class Eagle(Reference):
    def run(self, e, x):
        x = torch.cat([e, x], 1) @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)
        x = self.mlp(x + self.attention(x, "layers.0."), "layers.0.")
        return x @ self.head.T, x


class Eagle3(Reference):
    def enter(self, states):
        if self.config.get("norm_before_fc"):
            states = self.norm(states, "input_norm.weight")
        return states @ self.w["fc.weight"].T

    def run(self, e, x):
        at = "midlayer." if "midlayer.hidden_norm.weight" in self.w else "layers.0."
        g = self.norm(x, at + "hidden_norm.weight")
        is_speculators = "transformer_layer_config" in self.config
        if self.config.get("norm_before_residual", is_speculators):
            x = g
        both = torch.cat([self.norm(e, at + "input_layernorm.weight"), g], 1)
        x = self.mlp(x + self.attention(both, at), at)
        y = self.norm(x, "norm.weight")
        return y @ self.head.T, y if self.config.get("norm_output") else x
