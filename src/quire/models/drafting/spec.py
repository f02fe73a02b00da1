"""The part of a draft network that a decoder lacks: the stage before its layers, which reads hidden
states of the model whose tokens it guesses, the target. Its layers are those of every decoder.

A row of position t reads the token at t + 1 and the target's states at t, and guesses the token at
t + 2. In later passes it reads its own guess and, in place of the target's states, its own.
Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.models.spec import Decoder, Norm


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The way from token embeddings e and the target's states to the input x of a draft network's
    layers.

    `num_states` states of `width` numbers each come from the target, those that enter `aux_layers`
    of it; (): the one that its language-model head reads. Own states have the width of the network.

    - `join` fc: x = W @ [embed_norm(e), state_norm(h)] of one state h, with `states_first` the
      other way round (EAGLE, layers that predict further tokens);
    - `join` attention: x = state_norm(W @ fc_norm(states)), without W for own states, and the first
      layer's attention reads e as well (`spec.AttentionOverEmbedding`, EAGLE-3).

    `skips_first`: e is zero at position 0. `feeds_normed`: what a later pass reads is the state
    after the final norm. `vocab` is the target's; `has_embedding` and `has_head`: the network's own
    ones, else they are the target's. The head of a network has `Decoder.vocab` ids, which are the
    target's if there are as many; otherwise the checkpoint says which they are.
    """

    width: int
    vocab: int
    join: Literal["fc", "attention"] = "fc"
    num_states: int = 1
    aux_layers: tuple[int, ...] = ()
    embed_norm: Norm | None = None
    state_norm: Norm | None = None
    fc_norm: Norm | None = None
    fc_bias: bool = False
    states_first: bool = False
    skips_first: bool = False
    feeds_normed: bool = False
    has_embedding: bool = False
    has_head: bool = False

    @property
    def states_width(self) -> int:
        """Numbers of a token's states in the first pass."""
        return self.num_states * self.width


@dataclass(frozen=True, slots=True)
class DraftDecoder(Decoder):
    """A decoder whose first stage is `inputs` instead of an embedding alone."""

    inputs: DraftInputs = DraftInputs(0, 0)

    @property
    def is_partial(self) -> bool:
        """Whether its head has fewer ids than the target."""
        return self.vocab < self.inputs.vocab
