"""Experts in codes under Mistral's names, with transformers' logits of plain numbers."""

import re
from dataclasses import replace

import pytest

from quire.models import read_spec
from quire.models.config_reader import read_config
from tests.models.hostile.models import HOSTILE, make, oracle
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_chunked
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, write

LAYOUTS = FORMATS | BYTE_FORMATS
LARGE4 = HOSTILE["mistral_large4"]
WIDE = replace(LARGE4, keys={**LARGE4.keys, "moe_intermediate_size": 48})
"""Experts of whole groups."""
FEEDS = re.compile(r"layers\.\d+\.(experts\.\d+|shared_experts|feed_forward)\.w\d\.weight")
OTHERS = ("gptq-v1", "compressed-w4a16", "compressed-float-w8a16")


@pytest.mark.parametrize(
    "name", ["awq", *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)]
)
def test_logits_are_those_of_the_plain_numbers(tmp_path, name):
    made = make(WIDE, tmp_path / "source")
    plain = write(tmp_path / "source", tmp_path / "coded", LAYOUTS[name], FEEDS)
    ask = oracle(WIDE, plain)
    spec = read_spec(read_config(tmp_path / "coded"))
    found = run_chunked(load(tmp_path / "coded", spec, max_model_len=64), made.prompts)
    expected = [ask(prompt) for prompt in made.prompts]
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(made.logits, expected) > 0.01, "codes are other numbers"
