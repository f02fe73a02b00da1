"""What a model says to a program that would put other weights into it."""

from __future__ import annotations

from typing import NoReturn

from quire.errors import NotBuiltYet


class FixedWeights:
    """A model whose weights are those that it was loaded with."""

    def load_weights(self, weights: object) -> NoReturn:
        """Raise NotBuiltYet."""
        hint = (
            "Write a checkpoint and call collective_rpc('reload_weights'), or start a new engine."
        )
        raise NotBuiltYet("method", "load_weights", hint)
