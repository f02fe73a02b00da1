"""Torch's shared libraries, which a native thread loads while Python imports modules that need no
torch: a fifth of the time that importing torch takes. Free of torch.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from quire.hardware.native import find_native
from quire.hardware.nvidia import open_driver

_LIBRARIES = ("libtorch_global_deps.so", "libtorch_python.so")
"""Libraries in the order of `import torch`; the second brings all others with it."""
_FIRST = (
    *("asyncio", "base64", "csv", "grp", "hashlib", "json", "lzma", "mmap", "msgspec"),
    *("multiprocessing.connection", "numpy", "psutil", "queue", "tokenizers"),
)
"""Modules that engines or torch need and that have native code, or import some."""
_MEANWHILE = (
    *("gzip", "importlib.metadata", "importlib.resources", "multiprocessing.spawn", "pickletools"),
    *("tarfile", "torchgen.model", "unittest.mock", "urllib.request", "zipfile"),
)
"""Modules that torch imports, and that import no other native code than those."""


def load_torch_ahead() -> None:
    """Begin to load torch's libraries, for a process that is going to import torch. Does nothing
    where that has happened, or without native code or torch.
    """
    if "torch" in sys.modules:
        return
    native, _ = find_native()
    spec = importlib.util.find_spec("torch")
    if native is None or spec is None or not spec.submodule_search_locations:
        return
    # the loader of libraries has one lock: later all these would wait for torch's
    _import(_FIRST)
    with contextlib.suppress(OSError):
        open_driver()
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    native.load_ahead([str(folder / name) for name in _LIBRARIES])
    atexit.register(native.wait_for_libraries)  # a process must not end while one is loaded
    if hasattr(os, "register_at_fork"):
        # the child has no such thread: it would wait for its lock, or use half of a library
        os.register_at_fork(before=native.wait_for_libraries)


def wait_for_torch() -> None:
    """Wait for libraries that are being loaded, if there are any, and import meanwhile what torch
    is going to. Other threads of Python run as well; in an import that needs the libraries they
    would not.
    """
    if "torch" not in sys.modules:
        _import(_MEANWHILE)
    wait_for_libraries()


def wait_for_libraries() -> None:
    """Wait for libraries that are being loaded, if there are any."""
    native, _ = find_native()
    if native is not None:
        native.wait_for_libraries()


def _import(names: Iterable[str]) -> None:
    for name in names:
        # a Python may have been built without lzma, and another release of torch has other modules
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
