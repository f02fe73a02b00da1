"""Rows with adapters verify drafts with their adapter, and draft networks without."""

from pathlib import Path

import pytest

from quire import LLM, LoRARequest, SamplingParams, embedded
from quire.hardware.native import find_native
from tests.speculation.crowd import answers

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

ADAPTERS = Path(__file__).parents[1] / "lora" / "adapters"
ENGINE = {"enable_lora": True, "max_loras": 2, "max_model_len": 128, "max_num_seqs": 8}
PROMPTS = ["def add(a, b):", "class Stack:", "import os\nimport", "for i in range(3):\n    for"] * 2


def generate(llm):
    shout, comment = (
        LoRARequest(name, number, str(ADAPTERS / name))
        for number, name in enumerate(("shout", "comment"), 1)
    )
    params = [
        SamplingParams(
            max_tokens=40, temperature=0.7 * (i % 2), seed=i, logprobs=2, ignore_eos=True
        )
        for i in range(len(PROMPTS))
    ]
    chosen = [None, shout, comment, shout, None, comment, shout, None]
    return answers(llm.generate(PROMPTS, params, lora_request=chosen, use_tqdm=False))


@pytest.mark.parametrize(
    "drafts",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        {"method": "draft_model", "model": str(embedded.path()), "num_speculative_tokens": 3},
        {"method": "eagle3", "model": str(embedded.draft_head()), "num_speculative_tokens": 3},
    ],
    ids=lambda drafts: drafts["method"],
)
def test_answers_with_adapters_are_those_without_drafts(drafts):
    with LLM(**ENGINE) as llm:
        right = generate(llm)
    always = drafts | {"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
    with LLM(**ENGINE, speculative_config=always, disable_log_stats=False) as llm:
        assert generate(llm) == right
        counted = {metric.name: metric for metric in llm.get_metrics()}
        accepted = counted["vllm:spec_decode_num_accepted_tokens"].value
    assert accepted > 0
