"""Workers of the user's own, and methods for workers, which `collective_rpc` calls by their names
in every core, also in those that are processes of their own.
"""

from __future__ import annotations

import importlib

from quire.config.plan_parts import ParallelPlan
from quire.errors import InvalidParameter
from quire.executor.worker import Worker
from quire.plugins import class_of_option

_OPTION = "worker_extension_cls"
_NO_COUNTERPART = (
    "Workers that were written for vLLM have no counterpart: see worker_extension_cls."
)


def worker_class(parallel: ParallelPlan) -> type[Worker]:
    """The class of workers: Quire's, or one's own that is named as "module:Class"; with the methods
    of a class that is named as their extension, if one is.

    Raises InvalidParameter for what cannot be imported, is not a class that others can be made of,
    or has a name that workers have already.
    """
    own, extension = parallel.worker_cls, parallel.worker_extension_cls
    kind = Worker if own is None else class_of_option("worker_cls", own, Worker, _NO_COUNTERPART)
    if extension is None:
        return kind
    added = _imported(extension)
    names = {*dir(kind), *Worker.__annotations__}
    taken = sorted(name for name in dir(added) if not name.startswith("__") and name in names)
    if taken:
        allowed = f"workers have {', '.join(taken)} already"
        raise InvalidParameter(_OPTION, extension, allowed, "Choose other names.")
    try:
        return type("Worker", (kind, added), {})
    except TypeError as error:
        raise InvalidParameter(_OPTION, extension, f"workers cannot be of it ({error})") from error


def check_method(kind: type[Worker], method: str) -> None:
    """Raise InvalidParameter for a method that workers of this class do not have."""
    known = [n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n))]
    if method not in known:
        raise InvalidParameter(
            "method", method, f"a worker has the methods {', '.join(known)}",
            "A function that takes the worker can be passed instead.",
        )  # fmt: skip


def _imported(name: str) -> type:
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidParameter(_OPTION, name, f"it cannot be imported ({error})") from error
    if not isinstance(found, type):
        raise InvalidParameter(_OPTION, name, "it must be the name of a class")
    return found
