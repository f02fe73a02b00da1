"""The two stages of a causal language model of transformers."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from quire.models.foreign.library import refusal


class _Given(nn.Module):
    """Stands for the layers where the head alone is run: its result is what it is called with."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _Output(inputs_embeds)


class _Output:
    """Hidden states and nothing else: what some models have besides is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return


def split(architecture: str, model: Any) -> tuple[Any, Any]:
    """Split a model in body and head, which share its weights.

    `body(input_ids=..., position_ids=...)` gives hidden states, `head(inputs_embeds=hidden)` what
    the model makes of them: logits with the model's own scale, cap and rounding.
    """
    name = model.base_model_prefix
    body = model._modules.get(name)
    if body is None:
        raise refusal(architecture, f"its layers are not in one module ({name!r})")
    head = copy.copy(model)
    head._modules = {**model._modules, name: _Given()}
    return body, head
