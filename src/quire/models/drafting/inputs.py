"""The stage before a draft network's layers, and the mixer of EAGLE-3's first layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.drafting.spec import DraftDecoder, DraftInputs
from quire.models.layers import PlacedMixer, SubLayer
from quire.models.maker import Maker
from quire.ops import Batch, LinearWeight, NormWeight, Ops


@dataclass(frozen=True, slots=True)
class DraftStage:
    """Makes the layers' input of the tokens and states of a batch. `gates` [P, 1]: sigmoids of its
    entries are factors of the embeddings at each position; None: these stay as they are.
    """

    ops: Ops
    inputs: DraftInputs
    look_up: Callable[[Tensor], Tensor]
    gates: Tensor | None
    embed_norm: NormWeight | None
    state_norm: NormWeight | None
    fc_norm: NormWeight | None
    fc: LinearWeight

    def __call__(self, batch: Batch) -> Tensor:
        """The input [T, C] of the first layer, from `batch.ids` and the target's states
        [T, states_width] in `batch.states`. Sets `batch.layer_inputs` where a layer reads
        embeddings.
        """
        states = self._states(batch)
        if self.inputs.join == "fc":
            return self._joined(batch, states)
        normed = states if self.fc_norm is None else self.ops.norm(states, self.fc_norm)
        return self._beside(batch, self.ops.linear(normed, self.fc))

    def again(self, batch: Batch) -> Tensor:
        """Join the network's own states [T, C], which are in `batch.states`."""
        states = self._states(batch)
        if self.inputs.join == "fc":
            return self._joined(batch, states)
        return self._beside(batch, states)

    def _joined(self, batch: Batch, states: Tensor) -> Tensor:
        ops, embedded = self.ops, self._embedded(batch)
        if self.embed_norm is not None:
            embedded = ops.norm(embedded, self.embed_norm)
        if self.state_norm is not None:
            states = ops.norm(states, self.state_norm)
        first, second = (states, embedded) if self.inputs.states_first else (embedded, states)
        return ops.linear(ops.join_streams(first, second), self.fc)

    def _beside(self, batch: Batch, x: Tensor) -> Tensor:
        batch.layer_inputs = self._embedded(batch)
        return x if self.state_norm is None else self.ops.norm(x, self.state_norm)

    def _embedded(self, batch: Batch) -> Tensor:
        assert batch.ids is not None, "a draft network reads ids"
        embedded = self.look_up(batch.ids)
        if self.gates is None:
            return embedded
        return self.ops.scale_gate(embedded, self.ops.embed(batch.positions[0], self.gates))

    @staticmethod
    def _states(batch: Batch) -> Tensor:
        assert batch.states is not None, "a draft network reads states"
        return batch.states


def make_draft_stage(
    make: Maker, spec: DraftDecoder, look_up: Callable[[Tensor], Tensor]
) -> DraftStage:
    """Build the stage, in the order of its leaves."""
    inputs = spec.inputs

    def norm(name: str, is_here: bool = True) -> NormWeight | None:
        kind = {"embed": inputs.embed_norm, "state": inputs.state_norm, "fc": inputs.fc_norm}[name]
        return make.norm(f"draft.{name}_norm", kind) if kind is not None and is_here else None

    embed_norm = norm("embed")
    state_norm = norm("state", inputs.join == "fc")
    fc_norm = norm("fc")
    fc = make.linear("draft.fc", "draft.fc")
    # this norm belongs to the first layer, so its leaf comes after those of fc
    if inputs.join == "attention":
        state_norm = norm("state")
    return DraftStage(
        make.ops,
        inputs,
        look_up,
        gates=_gates(make) if inputs.skips_first else None,
        embed_norm=embed_norm,
        state_norm=state_norm,
        fc_norm=fc_norm,
        fc=fc,
    )


def make_over_embedding(ops: Ops, norm: NormWeight, mixer: PlacedMixer) -> SubLayer:
    """Make the sub-layer whose mixer reads normed embeddings next to the layer's input."""

    def mix(h: Tensor, batch: Batch) -> Tensor:
        assert batch.layer_inputs is not None, "the first stage has not run"
        return mixer(ops.join_streams(ops.norm(batch.layer_inputs, norm), h), batch)

    return mix


def _gates(make: Maker) -> Tensor:
    """Gates with sigmoids of 1 but at the first position: 0 next to a norm's epsilon."""
    # at 80 a sigmoid is 1 to the last bit, at -80 next to nothing
    gates = torch.full((make.max_model_len, 1), 80.0, dtype=make.dtype, device=make.device)
    gates[0] = -80.0
    return gates
