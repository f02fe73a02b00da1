"""What a feature that edits logits looks like to the sampler, and what it may look at."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.params import SamplingParams


class TokenHistory(Protocol):
    """The ids of each row's request, as the runner keeps them; read only.

    When the token at position p of row r is sampled, token_ids[r, :p] is what came before it.
    """

    @property
    def token_ids(self) -> Tensor:
        """Prompt, then output: [num_rows, max_len] int32 on the sampler's device."""
        ...


class LogitsPart(Protocol):
    """One feature that edits a row's logits before temperature.

    A part keeps what it made of a request's parameters, and nothing that sampling changes: what
    depends on earlier tokens is read from the history. So a step can be sampled again, and a
    resumed request goes on as if it had never left.
    """

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        """Take a request into `row`; False, and nothing kept, if it does not ask for this."""
        ...

    def remove(self, row: int) -> None:
        """Forget a row for which `add` returned True."""
        ...

    def wants(self, row: int, position: int) -> bool:
        """Whether the token at `position` is affected; if no part wants a row, it is not copied."""
        ...

    def apply(self, logits: Tensor, row: int, position: int) -> None:
        """Edit a row's logits [V] fp32 in place, for its token at `position`."""
        ...
