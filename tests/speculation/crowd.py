"""Requests that use every parameter of SamplingParams, and what is compared of their outputs."""

import json

from quire import SamplingParams
from quire.params import StructuredOutputsParams as Form
from quire.params.structured import RepetitionDetectionParams as Repetition

START, END = "<think>", "</think>"
MARKS = {"reasoning_start_str": START, "reasoning_end_str": END}

PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path =",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i in",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GRAMMAR = """
start: "SELECT " names " FROM " NAME
names: NAME ("," NAME)*
NAME: /[a-z]{1,6}/
"""
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag", "begin": "<a>", "end": "</a>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
        },
    }
)  # fmt: skip
VARIANTS = [
    {},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.4, "top_p": 0.8, "top_k": 30, "min_p": 0.1, "logprobs": 0},
    {"repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.3, "frequency_penalty": 0.7, "presence_penalty": 0.5, "logprobs": 1},
    {"logit_bias": {17: 3.0, 5: -8.0}, "temperature": 0.6, "logprobs": 1},
    {"bad_words": ["Return a", "able string", " number of", "The num"], "logprobs": 1},
    {"min_tokens": 12, "stop": ["\n\n", "self"], "include_stop_str_in_output": True},
    {"min_tokens": 9, "temperature": 1.5, "stop_token_ids": list(range(30, 400))},
    {"stop_token_ids": list(range(40, 120)), "temperature": 0.9, "logprobs": 1},
    {"allowed_token_ids": list(range(20, 400, 3)), "temperature": 1.0, "logprobs": 1},
    {"logprob_token_ids": [3, 9, 100], "temperature": 0.8},
    {"n": 3, "temperature": 1.0, "logprobs": 1},
    {"repetition_detection": Repetition(max_pattern_size=8, min_count=3)},
    {"structured_outputs": Form(json=SCHEMA), "temperature": 0.9, "logprobs": 1},
    {"structured_outputs": Form(regex=r"(yes|no)( maybe)*, [0-9]{3,9}"), "logprobs": 1},
    {"structured_outputs": Form(choice=["alpha", "alphabet", "beta"]), "min_tokens": 2},
    {"thinking_token_budget": 6, "temperature": 1.0, "logprobs": 1},
    {"max_tokens": 1},
    {"max_tokens": 2, "temperature": 1.0},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False, "logit_bias": {3: 9.0}},
    {"detokenize": False, "temperature": 1.0, "flat_logprobs": True, "logprobs": 2},
    {"ignore_eos": False, "logit_bias": {1: 60.0}, "min_tokens": 11, "temperature": 1.0},
    {"truncate_prompt_tokens": 7, "skip_reading_prefix_cache": True, "repetition_penalty": 0.8},
    {"structured_outputs": Form(grammar=GRAMMAR), "temperature": 1.0, "logprobs": 1},
    {"structured_outputs": Form(json_object=True), "temperature": 1.0, "min_tokens": 5},
    {"structured_outputs": Form(structural_tag=TAG), "temperature": 1.0, "min_p": 0.05},
    {
        "structured_outputs": Form(json=SCHEMA, starts_after=END),
        "thinking_token_budget": 5, "temperature": 1.0, "logprobs": 1,
    },
]  # fmt: skip
ELSEWHERE = {
    "extra_args": "test_same_answers.py: callables of requests",
    "output_kind": "test_lives.py and test_request_metrics.py: deltas",
    "routed_experts_prompt_start": "test_layers.py: the experts of tokens",
    "skip_clone": "how the parameters are copied",
    "stream_interval": "test_crowded_lives.py",
    **dict.fromkeys(
        ("prompt_logprob_token_ids", "prompt_logprob_start"),
        "tests/engine/test_end_to_end.py: rows for each token of one prompt",
    ),
    **dict.fromkeys(("trace_decode_token_ids", "watermarking"), "refused"),
}
"""Fields that no variant has, and where they are."""


REPORTS = {
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs", "n"),
    *("skip_reading_prefix_cache", "spaces_between_special_tokens"),
}
"""Fields that change no text of this model."""


def params_of(variant, seed, max_tokens=40):
    """The parameters of a request: greedy unless the variant says otherwise."""
    fields = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "seed": seed}
    return SamplingParams(**(fields | variant))


def crowd(count=None, max_tokens=40):
    """Prompts and parameters, one for each variant, or `count` of them in turn."""
    count = len(VARIANTS) if count is None else count
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    variants = [VARIANTS[i % len(VARIANTS)] for i in range(count)]
    for i, variant in enumerate(variants):
        if "thinking_token_budget" in variant:
            prompts[i] += START
    return prompts, [params_of(v, seed=i, max_tokens=max_tokens) for i, v in enumerate(variants)]


def answers(outputs):
    """All of the outputs that must be the same."""
    found = []
    for output in outputs:
        found.append(_columns(output.prompt_logprobs))
        for one in output.outputs:
            ends = one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob
            found.append((list(one.token_ids), _columns(one.logprobs), *ends))
    return found


def _columns(columns):
    if columns is None:
        return None
    return [
        None if each is None else {k: (v.logprob, v.rank) for k, v in each.items()}
        for each in columns
    ]
