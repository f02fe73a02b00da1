"""Imports without what they do again and again: Python's collector looks at objects that stay, a
sixth of the time that importing torch takes, and the methods of dataclasses are compiled.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from quire.generated_methods import compiled_methods


@contextmanager
def quick_imports(*, lasting: bool = False) -> Iterator[None]:
    """Import without collections, `lasting` or not, and methods as they were compiled before."""
    with without_collections(lasting=lasting), compiled_methods():
        yield


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
