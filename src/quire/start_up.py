"""Imports without what they do again and again: Python's collector looks at objects that stay, a
sixth of the time that importing torch takes, the methods of dataclasses are compiled, and the
modules of frames are searched for. And without what serving does not need.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

from quire.generated_methods import compiled_methods
from quire.late_meta_kernels import late_meta_kernels


@contextmanager
def quick_imports(*, lasting: bool = False) -> Iterator[None]:
    """Import without collections, `lasting` or not, with methods as they were compiled before,
    without searches for the modules of frames, and with torch's kernels for `meta` when they are
    needed.
    """
    with (
        without_collections(lasting=lasting),
        compiled_methods(),
        _known_modules(),
        late_meta_kernels(),
    ):
        yield


@contextmanager
def _known_modules() -> Iterator[None]:
    """Have `inspect.getmodule` answer for a frame from the frame's globals. It would resolve the
    file of each module there is, to find the one with the frame's: a twelfth of the time that
    importing torch takes, which asks for each operation that it registers.
    """
    search = inspect.getmodule
    if getattr(search, "is_quick", False):  # a block within a block
        yield
        return

    def getmodule(object: object, _filename: str | None = None) -> ModuleType | None:
        if isinstance(object, FrameType):
            module = sys.modules.get(object.f_globals.get("__name__", ""))
            if getattr(module, "__file__", None) == object.f_code.co_filename:
                return module
        return search(object, _filename)

    getmodule.is_quick = True  # type: ignore[attr-defined]
    inspect.getmodule = getmodule
    try:
        yield
    finally:
        if inspect.getmodule is getmodule:
            inspect.getmodule = search


@contextmanager
def without_collections(*, lasting: bool = False) -> Iterator[None]:
    """Collect no garbage while the block runs. What it has made is old afterwards: the next
    collection would look at all of it once more. Does nothing where collections are off.

    `lasting`: no later collection looks at what there is at the end of the block, either. That is
    for processes of Quire's own, in which imports make 120,000 objects and a thousand of garbage:
    to look at all of them takes 50 ms without torch, and more with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if lasting:
                gc.freeze()
            elif not gc.get_freeze_count():  # else others' frozen objects would thaw
                gc.freeze()  # moves all objects to a generation of their own,
                gc.unfreeze()  # and this to the oldest
            gc.enable()
