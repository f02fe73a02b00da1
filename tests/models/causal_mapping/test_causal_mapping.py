"""Names of transformers' mapping of causal language models run or are refused as recorded, and what
runs through transformers' code has its logits. `python -m tests.models.causal_mapping.run` tries
all of them.
"""

import json

import pytest

from tests.models.causal_mapping.comparing import names, outcome_of
from tests.models.causal_mapping.run import RESULTS

SHARP = (
    "MarianForCausalLM",  # counts positions by itself
    "DoryForCausalLM",  # loops over layers, and layers without attention
    "LongcatFlashForCausalLM",  # latents, two layers of attention in one
    "XmodForCausalLM",  # weights by language
    "CohereCompassForCausalLM",  # rotations by kind of layer
    "Lfm3ForCausalLM",  # more layers with states than with keys
)
KNOWN = json.loads(RESULTS.read_text(encoding="utf-8"))
RUNNING = [
    name
    for name, entry in KNOWN.items()
    if (entry["kind"] == "fallback" and entry["error"] is not None)
    or entry["through_transformers"] is not None
]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHARP else [pytest.mark.full]) for n in RUNNING]
)
def test_a_name_that_runs_through_transformers_has_its_logits(name, tmp_path):
    outcome = outcome_of(name, tmp_path, "transformers")
    assert (outcome.kind, outcome.is_equal) == ("fallback", True), outcome


def test_every_name_runs_or_is_refused_with_a_reason():
    assert list(KNOWN) == names()
    for name, entry in KNOWN.items():
        if entry["kind"] == "refused":
            assert entry["why"] and entry["error"] is None, name
        elif entry["error"] is None:
            assert entry["kind"] == "native" or "no small form" in entry["why"]
        else:
            assert entry["error"] < 1e-4
    assert len(RUNNING) >= 45
    assert set(SHARP) <= set(RUNNING)
