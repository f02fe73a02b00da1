"""Kernels that torch registers for the device `meta`, when something needs them.

A quarter of the time that `import torch` takes goes into a thousand kernels in Python that compute
the shapes of tensors without memory: `torch._meta_registrations`. Tracing and building modules
without weights need them, serving does not. So an empty module stands in for this one, until
something needs it: a tensor on that device (all of them come from two operations), a name of the
module, or another module of torch, which may rely on what this one has imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch._meta_registrations"


@contextmanager
def late_meta_kernels() -> Iterator[None]:
    """Import torch without its kernels for the device `meta`, which are there when needed."""
    is_within = any(isinstance(finder, _LateModule) for finder in sys.meta_path)
    if is_within or "torch" in sys.modules:
        yield
        return
    late = _LateModule()
    sys.meta_path.insert(0, late)
    try:
        yield
    finally:
        # that one is needed later, and one that something has needed already is gone
        if not late.stands_in and late in sys.meta_path:
            sys.meta_path.remove(late)


class _LateModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads an empty module in the place of `_MODULE`, and this once it is needed."""

    def __init__(self) -> None:
        self.stands_in = False
        self._lock = threading.Lock()
        self._kernels: Any = None  # before the module is asked for

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _MODULE and self._kernels is None:
            return ModuleSpec(fullname, self)
        if fullname.startswith("torch.") and self.stands_in and not _is_torch_importing():
            self._import()
        return None

    def exec_module(self, module: ModuleType) -> None:
        import torch

        # Torch has kernels in C++ for both operations, and these lie over them. Its `Library` would
        # refuse one that the module registers as well.
        self._kernels = torch._C._dispatch_library("IMPL", "aten", "Meta", __file__, 0)
        aten: Any = torch.ops.aten
        for op in (aten.empty.memory_format, aten.empty_strided.default):
            self._kernels.impl(op.name(), "Meta", self._kernel(op), False)
        vars(module)["__getattr__"] = self._attribute
        self.stands_in = True

    def _kernel(self, op: Any) -> Any:
        def import_and_call(*args: Any, **kwargs: Any) -> Any:
            self._import()
            return op(*args, **kwargs)

        return import_and_call

    def _attribute(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks all modules for such names
            raise AttributeError(f"module {_MODULE!r} has no attribute {name!r}")
        return getattr(self._import(), name)

    def _import(self) -> ModuleType:
        # Not held during the import: a thread that waits for it may hold a module's own lock.
        with self._lock:
            if self.stands_in:
                self.stands_in = False
                sys.meta_path.remove(self)
                del sys.modules[_MODULE]
        module = importlib.import_module(_MODULE)  # waits for the thread that began
        self._kernels.reset()
        return module


def _is_torch_importing() -> bool:
    return bool(getattr(sys.modules["torch"].__spec__, "_initializing", False))
