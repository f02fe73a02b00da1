"""Python's collector during imports: they make objects that stay, and it would look at all of them
again and again, which takes a sixth of the time that importing torch takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage while the block runs. What it has made is old afterwards: the next
    collection would look at all of it once more. Does nothing where collections are off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else others' frozen objects would thaw
                gc.freeze()  # moves all objects to a generation of their own,
                gc.unfreeze()  # and this to the oldest
            gc.enable()
