"""Tokens choose experts in Triton as in plain torch; pairs are grouped without a look at them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def test_triton_routes_as_torch_does(run_triton_script):
    script = Path(__file__).with_name("triton_routing.py")
    assert run_triton_script(script, interpret=True) == []
