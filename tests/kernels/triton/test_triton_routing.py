"""Tokens choose experts in Triton as in plain torch; pairs are grouped without a look at them."""

from __future__ import annotations

from pathlib import Path

from tests.support.needs import needs_triton

pytestmark = needs_triton


def test_triton_routes_as_torch_does(run_triton_script):
    script = Path(__file__).with_name("triton_routing.py")
    assert run_triton_script(script, interpret=True) == []
