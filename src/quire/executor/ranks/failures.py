"""Errors of ranks as messages, and the error of a task that several ranks report."""

from __future__ import annotations

from collections.abc import Mapping

from quire import errors
from quire.distributed.worker_group import ExchangeAborted
from quire.encodable import text_of
from quire.errors import EngineDeadError, EngineError, PeersLost
from quire.executor.ranks.messages import FailedTask
from quire.step.faults import CustomCodeFailure, ProcessorFailure, RowFailures

_ABORTED = ExchangeAborted.__name__


class RankFailure(Exception):
    """A worker in another process raised; the text names its class. `is_of_another`: it has given
    up only because another one has failed.
    """

    is_of_another = False


def failure_of(error: BaseException) -> FailedTask:
    """The message of an error."""
    rows = error.errors if isinstance(error, RowFailures) else {}
    return FailedTask(type(error).__name__, text_of(error), dict(rows))


def cause_of(failures: Mapping[int, FailedTask]) -> Exception:
    """The error of a task that failed on all ranks: that of another core or a device that is gone,
    else all failed rows, else the first that is more than the end of an exchange.
    """
    by_kind: dict[str, list[FailedTask]] = {}
    for failure in failures.values():
        by_kind.setdefault(failure.kind, []).append(failure)
    for kind in PeersLost, EngineDeadError:
        if dead := by_kind.get(kind.__name__):
            return kind(dead[0].text)
    if named := by_kind.get(RowFailures.__name__):
        return RowFailures({row: text for each in named for row, text in each.rows.items()})
    own = [each for each in failures.values() if each.kind != _ABORTED]
    return error_of((own or list(failures.values()))[0])


def error_of(failure: FailedTask) -> Exception:
    """The error that a message is of, as far as its class is one that callers know."""
    if failure.kind == ProcessorFailure.__name__:
        reported = ProcessorFailure.__new__(ProcessorFailure)
        Exception.__init__(reported, failure.text)
        return reported
    if failure.kind == CustomCodeFailure.__name__:
        return CustomCodeFailure(failure.text)
    if (known := known_error(failure.kind, failure.text)) is not None:
        return known
    builtin = _BUILTIN.get(failure.kind)
    if builtin is not None:
        return builtin(failure.text)
    found = RankFailure(f"{failure.kind}: {failure.text}")
    found.is_of_another = failure.kind == _ABORTED
    return found


def known_error(kind_name: str, text: str) -> EngineError | None:
    """The error of a class of quire.errors, with this text alone; None for another class."""
    kind = vars(errors).get(kind_name)
    if not (isinstance(kind, type) and issubclass(kind, EngineError)):
        return None
    # the constructors of these classes take other arguments than a text
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


_BUILTIN: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, AssertionError, OSError)
}
