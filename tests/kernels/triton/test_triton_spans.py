"""Tokens of a span see all of it in the Triton kernel, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.needs import needs_triton

pytestmark = needs_triton


@pytest.mark.full
def test_spans(run_triton_script):
    """See triton_spans.py."""
    found = run_triton_script(Path(__file__).with_name("triton_spans.py"), interpret=True)
    assert len(found) == 6 and not any(found.values()), found
