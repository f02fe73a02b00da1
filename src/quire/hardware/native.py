"""The native module, which is free of torch."""

from __future__ import annotations

import importlib
from types import ModuleType


def find_native() -> tuple[ModuleType | None, str]:
    """Return quire._native, or why this installation does not have it."""
    try:
        return importlib.import_module("quire._native"), ""
    except ModuleNotFoundError:
        return None, "the native module was not built (the install found no C++ compiler)"
    except ImportError as error:  # built for another Python or C library
        return None, f"the native module does not load: {error}"
