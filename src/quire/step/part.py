"""A kind of output apart from token ids: what a step tells of one request."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class OutputPart(msgspec.Struct, array_like=True, gc=False, tag=True):
    """The base class of all kinds, which step/columns.py lists. Messages, brokers, journals and the
    split of a step that is run again treat them alike; engine/outputs/ keeps them for the caller.
    """

    comes_at_end: ClassVar[bool] = False
    """Whether it counts only in a request's last step: a preempted request gets it again."""
    done_field: ClassVar[str | None] = None
    """The field of a request's message that says that the part was reported, of one that is not
    reported again when the request goes on in another core.
    """
    documented: ClassVar[str | None] = None
    """The field of `EngineCoreOutput` with its `value`; None: it is not shown there."""

    handle: int

    @property
    def value(self) -> Any:
        """The value under the documented name."""
        raise NotImplementedError

    @classmethod
    def of_value(cls, handle: int, value: Any) -> OutputPart:
        """The part of a request with this handle that a program made."""
        raise NotImplementedError


class VerifiedDrafts(OutputPart):
    """The drafts of a request that a step verified, and how many of them were right."""

    num_drafts: int
    num_accepted: int
