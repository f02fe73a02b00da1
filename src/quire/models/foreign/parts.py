"""The two stages of a causal language model of transformers."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from quire.models.foreign.library import refusal

POSITIONS = "position_ids"
"""The name of positions in transformers, among the arguments of bodies and of their tables."""


class GivenPositions:
    """Puts the positions of a step in the place of those that a body counts by itself, where it
    hands them to the module that looks them up.
    """

    def __init__(self, table: nn.Module) -> None:
        self.positions: Tensor | None = None
        table.register_forward_pre_hook(self._place, with_kwargs=True)

    def _place(self, _: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        assert self.positions is not None, "a step has positions"
        counted = named[POSITIONS]
        return inputs, {**named, POSITIONS: self.positions.view(counted.shape)}


class _Given(nn.Module):
    """Stands for the layers where the head alone is run: its result is what it is called with."""

    @property
    def decoder(self) -> nn.Module:
        """The decoder of a wrapper around the layers: itself."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _Output(inputs_embeds)


class _Output:
    """Hidden states and nothing else: what some models have besides is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        # what Python looks for by itself must be missing, and not None
        if name.startswith("__"):
            raise AttributeError(name)
        return


def split(architecture: str, model: Any) -> tuple[Any, Any]:
    """Split a model in body and head, which share its weights.

    `body(input_ids=..., position_ids=...)` gives hidden states, `head(inputs_embeds=hidden)` what
    the model makes of them: logits with the model's own scale, cap and rounding.
    """
    name = model.base_model_prefix
    if name not in model._modules:
        name = "model"
    body = model._modules.get(name)
    if body is None:
        raise refusal(architecture, f"its layers are not in one module ({model.base_model_prefix})")
    head = copy.copy(model)
    head._modules = {**model._modules, name: _Given()}
    is_wrapper = list(body._modules) == ["decoder"]
    return body.decoder if is_wrapper else body, head
