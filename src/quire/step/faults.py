"""Failures of a step, limited to the rows concerned, with the error text for each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.encodable import text_of
from quire.errors import EngineDeadError

_MAX_SHOWN = 200


class RowFailures(Exception):
    """Some of a plan's rows cannot run; the step may be launched again without them.

    `errors` has the error text for the request of each of these rows.
    """

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__(f"rows {sorted(errors)} cannot run")
        self.errors = dict(errors)


class LateFailure(Exception):
    """A launched step has failed, and only the reading of its results says so; it has changed
    nothing but rows, as its plan says. `cause` is what `launch` or `sample` would have raised.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class EarlierFailure(Exception):
    """A plan has rows of a step whose results have not been read and are a LateFailure: it can be
    launched once they are, without the rows that have failed. As the end of a launched step: it did
    not run, because it follows such a step, and has changed nothing but rows, as its plan says.
    """


class ProcessorFailure(Exception):
    """A custom logits processor raised; the text is the processor's own and fit for users."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(processor_text(error))


class CustomCodeFailure(Exception):
    """The operator's own code raised what would end the process, or pass for a dead device."""


def contained(error: BaseException) -> Exception:
    """Wraps an error of the operator's code (a drafter, a logits processor, a worker's method), as
    an exception that costs a request or a call at most. Raises KeyboardInterrupt, which is the
    terminal's.
    """
    # Ctrl-C is not the fault of the code that it met
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, Exception) and not isinstance(error, EngineDeadError):
        return error
    return CustomCodeFailure(f"{type(error).__name__}: {text_of(error)}")


def processor_text(error: BaseException) -> str:
    """A request's error text when the operator's code raised: a first line, no addresses."""
    try:
        lines = str(error).splitlines()
    except Exception:  # making the text runs the operator's code, too
        lines = []
    # addresses say nothing to a user, and differ from run to run
    said = re.sub(r"0x[0-9a-fA-F]+", "0x...", lines[0])[:_MAX_SHOWN] if lines else ""
    return f"a logits processor failed: {type(error).__name__}: {said}".removesuffix(": ")
