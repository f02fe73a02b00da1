"""The optimizer for the matrices inside the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedded_model.model import Model


class Muon:
    """Momentum whose update is orthogonalised (K. Jordan and others, 2024), for layer matrices.

    Matrices of one shape are orthogonalised together; merged projections are cut into their parts
    first, because each part is a map of its own. Updates have a root mean square of 0.2 times the
    rate whatever the shape (J. Liu and others, 2025).
    """

    def __init__(self, model: Model, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.parameters = [
            p for layer in model.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        self.velocities = [torch.zeros_like(p) for p in self.parameters]
        shape = model.shape
        q, kv = (
            shape.num_attention_heads * shape.head_dim,
            shape.num_key_value_heads * shape.head_dim,
        )
        inner, width = shape.intermediate_size, shape.hidden_size
        self.cuts = [[q, kv, kv], [width], [inner, inner], [width]] * len(model.layers)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters from their gradients with learning rate `rate`."""
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for parameter, velocity, cuts in zip(
            self.parameters, self.velocities, self.cuts, strict=True
        ):
            assert parameter.grad is not None
            velocity.lerp_(parameter.grad, 1 - self.momentum)
            update = parameter.grad.lerp(velocity, self.momentum)
            for part, wanted in zip(parameter.split(cuts), update.split(cuts), strict=True):
                tall = wanted.shape[0] > wanted.shape[1]
                part, wanted = (part.T, wanted.T) if tall else (part, wanted)
                groups.setdefault(tuple(wanted.shape), []).append((part, wanted))
        for members in groups.values():
            updates = orthogonalise(torch.stack([wanted for _, wanted in members]))
            for (part, _), update in zip(members, updates, strict=True):
                part.mul_(1 - rate * self.weight_decay)
                part.add_(update, alpha=-rate * 0.2 * max(update.shape) ** 0.5)


class PlainMuon:
    """The same for matrices that are not merged, one by one."""

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.95) -> None:
        self.parameters, self.momentum = parameters, momentum
        self.velocities = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters from their gradients with learning rate `rate`."""
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            assert parameter.grad is not None
            velocity.lerp_(parameter.grad, 1 - self.momentum)
            wanted = parameter.grad.lerp(velocity, self.momentum)
            tall = wanted.shape[0] > wanted.shape[1]
            update = orthogonalise((wanted.T if tall else wanted)[None])[0]
            update = update.T if tall else update
            parameter.add_(update, alpha=-rate * 0.2 * max(update.shape) ** 0.5)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of wide matrices [N, rows, columns] towards 1 (Newton-Schulz)."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x
