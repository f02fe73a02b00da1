"""Loads plugins, each at its own risk: one that raises or hangs is named in the log, what it has
registered is taken back, and the others go on.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

from quire.environment import read_plugin_environment
from quire.errors import PluginError
from quire.plugins.entry_points import EntryPoint, all_installed, allowed, installed
from quire.plugins.records import PluginRecord, current_record, enter
from quire.plugins.references import attribute_at

logger = logging.getLogger(__name__)

_NAMES_OF_VLLM = (".as_vllm", "quire")
"""Imported by name, from above: only plugins that were written for vLLM need it."""

_lock = threading.Lock()
_records: dict[EntryPoint, PluginRecord] = {}
_values: dict[EntryPoint, Any] = {}


def load_general_plugins() -> None:
    """Call the plugins of the group `general_plugins` that were not called in this process yet, and
    let those that were written for vLLM find its names.
    """
    if current_record() is not None:  # one of them calls
        return
    with _lock:
        if any(point.prefix == "vllm" and allowed(point) for point in all_installed()):
            _serve_names_of_vllm()
        for point in installed("general_plugins"):
            if point not in _records and allowed(point):
                _values[point] = _run(point, lambda point: _call(_value_of(point), point))


def load_group(group: str) -> dict[str, Any]:
    """The values of a group's plugins, by name; the log names those left out, also duplicates."""
    found: dict[str, Any] = {}
    holders: dict[str, EntryPoint] = {}
    for point in filter(allowed, installed(group)):
        if point.name in found:
            logger.error(
                "%s is left out: %s has the same name.", point.title, holders[point.name].title
            )
            continue
        if _loaded(point).failure is None:
            found[point.name], holders[point.name] = _values[point], point
    return found


def records() -> list[PluginRecord]:
    """The records of the plugins that this process has loaded."""
    return list(_records.values())


def _loaded(point: EntryPoint) -> PluginRecord:
    # a plugin that loads another one runs while its own loader holds the lock
    with nullcontext() if current_record() is not None else _lock:
        if point not in _records:
            _values[point] = _run(point, _value_of)
        return _records[point]


def _run(point: EntryPoint, action: Callable[[EntryPoint], Any]) -> Any:
    """The result of an action of a plugin; None where it fails, and the record says why.

    It runs in a thread of its own, which is left alone where it does not end in time: an import
    cannot be interrupted.
    """
    record = _records[point] = PluginRecord(point)
    limit_s = read_plugin_environment().timeout_s
    results: list[Any] = []

    def work() -> None:
        enter(record)
        try:
            results.append(action(point))
        except BaseException as error:  # also SystemExit: it ends nothing but the plugin
            record.fail(f"failed: {describe(error)}")
            logger.debug("Traceback of a plugin", exc_info=error)

    # in a thread, since a plugin that hangs can only be left behind
    thread = threading.Thread(target=work, name=f"plugin {point.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        record.fail(
            f"has not come to an end in {limit_s:g} s (QUIRE_PLUGIN_TIMEOUT): it hangs, or waits "
            "for something."
        )
    if record.failure is None:
        return results[0]
    text = "Plugin %s is left out: it %s The engine goes on without it."
    logger.error(text, point.title, record.failure)
    return None


def describe(error: BaseException) -> str:
    """A plugin's error in one line that ends with a full stop."""
    text = " ".join(str(error).split())
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, PluginError):
        named = text
    return named if named.endswith(".") else f"{named}."


def _value_of(point: EntryPoint) -> Any:
    module, _, path = point.value.partition(":")
    return attribute_at(importlib.import_module(module.strip()), path.strip())


def _call(function: Any, point: EntryPoint) -> Any:
    if not callable(function):
        raise PluginError(f"It must be a function without arguments, and is {function!r}.")
    return function()


def _serve_names_of_vllm() -> None:
    """Let `import vllm` find Quire's names, unless the program has imported another one."""
    if "vllm" not in sys.modules and find_spec(*_NAMES_OF_VLLM) is not None:
        importlib.import_module(*_NAMES_OF_VLLM)
