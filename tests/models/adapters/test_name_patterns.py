"""Patterns of names: the value that PEFT's rule finds, in whatever way a pattern is written."""

import re

import pytest

from quire.models.adapters.name_patterns import name_patterns

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 11, 21)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.experts.down_proj")
]
PATTERNS = [
    {"q_proj": 1, "self_attn.q_proj": 2},
    {"self_attn.q_proj": 2, "q_proj": 1},
    {r"layers.1.self_attn.q_proj": 3, r"layers\.1\.mlp\.up_proj": 4, "up_proj": 5},
    {r"layers\.\d\.self_attn.q_proj": 3, r".*\.\d\d\.mlp.up_proj": 4},
    {"^model.layers.0.self_attn.q_proj": 6, "^layers.1.self_attn.q_proj": 7, "^q_proj": 8},
    {r"^model\.layers\.1.*up_proj": 9, "o_proj$": 10, "proj": 11},
    {"(q|o)_proj": 12, r"layers\.[01]\.mlp\.up_proj": 13, "experts.down_proj": 14},
    {r"model.layers.\d+.mlp.up_proj": 15, "mlp.*": 16, ".*": 17},
    {r"\w+_proj": 18, "": 19},
]


@pytest.mark.parametrize("patterns", PATTERNS)
def test_the_first_that_matches_counts(patterns):
    found = name_patterns("rank_pattern", patterns)
    for name in NAMES:
        matching = (v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
        assert found.value_of(name, 0) == next(matching, 0), name
