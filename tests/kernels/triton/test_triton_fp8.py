"""8-bit floats in the Triton kernels: the numbers of torch's cast, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.needs import needs_triton

pytestmark = needs_triton
CHECKS = (
    "each_code_is_read_as_torch_reads_it",
    "rows_are_rounded_as_torch_casts",
    "the_cache_has_the_bytes_of_the_definition",
    "blocks_go_from_one_provider_to_the_other_unchanged",
    "the_loss_is_that_of_three_bits",
)


@pytest.fixture(scope="module")
def failures(run_triton_script):
    """What each check says; see triton_fp8.py."""
    return run_triton_script(Path(__file__).with_name("triton_fp8.py"), interpret=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"triton-{check}")
def test_fp8(failures, check):
    assert failures[check] is None
