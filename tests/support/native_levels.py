"""The levels of instruction sets at which a family of native kernels has code of its own."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

CMAKE = Path(__file__).parents[2] / "CMakeLists.txt"


@cache
def levels_with(*kernels: str) -> set[str]:
    """The levels for which one of these files of csrc/kernels is compiled; at the others its
    functions are those of the level before, which need no second test.
    """
    calls = re.findall(r"quire_level\((\w+)\s([^)]*)\)", CMAKE.read_text(encoding="utf-8"))
    found = {level for level, files in calls if set(kernels) & set(files.split())}
    assert "portable" in found, f"no kernels {kernels} are compiled"
    return found
