"""Python's collector during imports: they make objects that stay, and it would look at all of them
again and again, which takes a sixth of the time that importing torch takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage while the block runs, unless somebody else has switched that off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
