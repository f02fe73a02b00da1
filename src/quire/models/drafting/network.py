"""A draft network as its files have it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.models.drafting.spec import DraftDecoder
from quire.models.rules import Family
from quire.models.spec import Decoder


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """A draft network, a decoder of its own or one with `DraftInputs`, and the names of its
    tensors. `ids`: the tensor that says which of the target's ids its own are, as distances; None:
    they are the same.
    """

    spec: Decoder
    family: Family
    ids: str | None = None

    @property
    def borrows_table(self) -> bool:
        """Whether it looks tokens up in the target's table."""
        return isinstance(self.spec, DraftDecoder) and not self.spec.inputs.has_embedding

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs it reads."""
        return self.spec.inputs.aux_layers if isinstance(self.spec, DraftDecoder) else ()
