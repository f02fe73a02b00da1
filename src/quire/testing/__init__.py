"""Doubles and small models that tests and benchmarks share, shipped so that users can test with
them.

The names are imported when asked for: the doubles of an engine core must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.testing.checkpoints import make_checkpoint

__all__ = ["make_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "make_checkpoint":
        from quire.testing.checkpoints import make_checkpoint

        return make_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
