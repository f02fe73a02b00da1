"""Products of parameters of which the default run takes the sharp ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sharp(cases: Iterable[Any], is_sharp: Callable[..., bool]) -> list[Any]:
    """All cases for `parametrize`, those that are not sharp marked `full`: they run with `--full`
    only. Cases of several values are tuples, whose values `is_sharp` gets one by one.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if is_sharp(*values) else pytest.mark.full
        found.append(pytest.param(*values, marks=marks))
    return found
