"""The embedded model for training: Llama's arithmetic in plain torch, projections merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """The size of the model; the names are those of transformers' `LlamaConfig`."""

    vocab_size: int = 3072
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class Layer(nn.Module):
    """One decoder layer: grouped-query attention with rotary positions, then a gated MLP."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width, inner = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        merged = inner + 2 * shape.num_key_value_heads * shape.head_dim
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(torch.randn(merged, width) * width**-0.5)
        self.out = nn.Parameter(torch.zeros(width, inner))
        self.gate_up = nn.Parameter(torch.randn(2 * shape.intermediate_size, width) * width**-0.5)
        self.down = nn.Parameter(torch.zeros(width, shape.intermediate_size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x [R, T, C] to [R, T, C]; cos and sin are [T, D]."""
        x = x + self.attend(self.norm(x, self.attention_norm), cos, sin)
        gate, up = F.linear(self.norm(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden_size,), weight, self.shape.rms_norm_eps)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention over x [R, T, C]."""
        heads, kv_heads = self.shape.num_attention_heads, self.shape.num_key_value_heads
        qkv = F.linear(x, self.qkv).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        v = qkv[:, heads + kv_heads :]
        q, k = rotate(qkv[:, : heads + kv_heads], cos, sin).split([heads, kv_heads], dim=1)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(-2), self.out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [R, H, T, D] in the half-split layout of Llama checkpoints."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Model(nn.Module):
    """The decoder with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(shape.max_position_embeddings)[:, None] / shape.rope_theta**half
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [R, T] to logits [R, T, V]."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = F.rms_norm(x, (self.shape.hidden_size,), self.norm, self.shape.rms_norm_eps)
        return F.linear(x, self.embedding)


def token_losses(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target in nats, flat [R * T]."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
