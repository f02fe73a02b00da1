"""Marks of tests that need something of an installation or of the system."""

from __future__ import annotations

import importlib.util
import os

import pytest

from quire.hardware.native import find_native

NATIVE, _REASON = find_native()
needs_native = pytest.mark.skipif(NATIVE is None, reason=_REASON)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_ranks = [
    pytest.mark.skipif(NATIVE is None, reason="ranks exchange by native code"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory of Linux"),
]
