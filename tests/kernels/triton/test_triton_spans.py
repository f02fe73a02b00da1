"""Tokens of a span see all of it in the Triton kernel, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.mark.full
def test_spans(run_triton_script):
    """See triton_spans.py."""
    found = run_triton_script(Path(__file__).with_name("triton_spans.py"), interpret=True)
    assert len(found) == 6 and not any(found.values()), found
