"""Requests that fail on the way: their outputs say why, a batch warns once, and logits with NaN say
how many they are.
"""

import json
import logging

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, EngineArgs, SamplingParams
from quire.cli import main
from quire.engine.client.inproc import build_client
from quire.engine.frontend.output_processor import failure_of
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.params import StructuredOutputsParams
from quire.params.structured import NO_TOKEN_LEFT
from quire.testing import make_checkpoint

ARGS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
SPOILED = [3, 5, 9]
PLAIN = SamplingParams(temperature=0.0, max_tokens=4)


def spoil(folder, name, rows):
    weights = load_file(folder / "model.safetensors")
    weights[name][rows] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A model three of whose logits are NaN."""
    shape = {"tie_word_embeddings": False}
    folder = make_checkpoint(tmp_path_factory.mktemp("few") / "model", shape, "llama")
    return spoil(folder, "lm_head.weight", SPOILED)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A model all of whose hidden states are NaN."""
    folder = make_checkpoint(tmp_path_factory.mktemp("every") / "model", "tiny")
    return spoil(folder, "model.norm.weight", slice(None))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# of a batch


def test_a_batch_says_once_how_many_have_failed_and_why(few, caplog):
    forbids = SamplingParams(
        temperature=0.0, max_tokens=4, allowed_token_ids=[7, 8], ignore_eos=True
    )
    with LLM(str(few), **ARGS) as llm:
        caplog.clear()
        outputs = llm.generate(["a"] * 4, [forbids, PLAIN, PLAIN, forbids], use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == [
            *("length", "error", "error", "length")
        ]
        assert [failure_of(output) is None for output in outputs] == [True, False, False, True]
        assert outputs[1].outputs[0].text == ""
        assert failure_of(outputs[1]).startswith("the model's logits are not finite")
        of_batch = [text for text in warnings_of(caplog) if "requests failed" in text]
        assert of_batch == [
            "2 of 4 requests failed; `error` in their outputs says why. The first, number 1: "
            + failure_of(outputs[1])
        ]
        caplog.clear()
        llm.generate(["a"] * 2, forbids, use_tqdm=False)
        assert warnings_of(caplog) == []


def test_a_form_that_no_allowed_token_begins_is_told(caplog):
    contradicts = SamplingParams(
        max_tokens=4,
        allowed_token_ids=[7],
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )
    with LLM(dtype="float32", max_model_len=64, num_gpu_blocks_override=60) as llm:
        outputs = llm.generate(["a", "b"], [contradicts, PLAIN], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    [said] = [text for text in warnings_of(caplog) if "requests failed" in text]
    assert said.startswith("1 of 2 requests failed;") and said.endswith(NO_TOKEN_LEFT)


def test_the_bar_shows_what_has_failed(every):
    class Bar:
        total_shown = []

        def __init__(self, **options):
            self.options = options

        def set_postfix_str(self, text, refresh):
            self.total_shown.append(text)

        def update(self, count):
            pass

        def close(self):
            pass

    with LLM(str(every), **ARGS) as llm:
        llm.generate(["a", "b"], PLAIN, use_tqdm=lambda **options: Bar(**options))
    assert Bar.total_shown[-1].endswith("output 0.0 tokens/s, 2 failed")


def test_all_completions_of_a_request_count_as_one(every, caplog):
    drawn = SamplingParams(temperature=1.0, max_tokens=4, n=3, seed=1)
    with LLM(str(every), **ARGS) as llm:
        [output] = llm.generate("a", drawn, use_tqdm=False)
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert any("1 of 1 requests failed" in text for text in warnings_of(caplog))


def test_pooled_results_that_are_not_finite_are_errors(every, caplog):
    with LLM(str(every), runner="pooling", **ARGS) as llm:
        outputs = llm.embed(["a", "b"], use_tqdm=False)
        [whole] = llm.encode("a", pooling_task="embed", use_tqdm=False)
    for output in (*outputs, whole):
        assert output.error.startswith("the model's result is not finite (NaN or infinity)")
    assert [output.outputs.embedding for output in outputs] == [[], []]
    assert sum("requests failed" in text for text in warnings_of(caplog)) == 2


def test_several_batches_are_answered_each(every, tmp_path):
    """`run-batch` ends with a code that says so, and each line with its reason."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": "a", "max_tokens": 2, "temperature": t} for t in (0, 1)]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(every)]
    more = ["--dtype", "float32", "--max-model-len", "64", "--disable-tqdm"]
    assert main.main([*words, *more]) == 1
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(results) == 2
    assert all("logits are not finite" in result["error"]["message"] for result in results)


# logits with NaN


def finished(plan, params, num_requests=2):
    """The ends of requests in a core of its own, and the documented outputs that have them."""
    client = build_client(plan)
    for handle in range(1, num_requests + 1):
        client.add_request(EngineCoreRequest(handle, [5, 6, 7], params, 1, 0.0))
    found = []
    while client.engine_core.has_work:
        found += [output for output in client.get_output() if output.finished]
    client.shutdown()
    return found


def plan_of(folder, **more):
    return EngineArgs(str(folder), **ARGS, **more).create_engine_config()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "top_k": 4, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {1: 5.0}},
        {"temperature": 0.7, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "drawn", "filtered", "biased", "penalised"],
)
@pytest.mark.parametrize("more", [{}, {"async_scheduling": False}], ids=["ahead", "plain"])
def test_the_number_of_nans_is_that_of_the_logits(few, params, more, caplog):
    own = SamplingParams(max_tokens=4, **params)
    ends = finished(plan_of(few, **more), own, num_requests=3)
    assert [end.num_nans_in_logits for end in ends] == [len(SPOILED)] * 3
    assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
    [text] = [text for text in warnings_of(caplog) if "NaN" in text and "logits" in text]
    assert text.startswith("Request 1 failed: 3 of its logits are NaN.")


def test_all_logits_are_counted(every):
    plan = plan_of(every)
    ends = finished(plan, PLAIN, num_requests=1)
    assert [end.num_nans_in_logits for end in ends] == [plan.model.vocab_size]


def test_a_request_without_nan_has_none_next_to_one_that_has_some(few):
    allowed = SamplingParams(temperature=0.0, max_tokens=3, allowed_token_ids=[7, 8])
    ends = finished(plan_of(few), allowed)
    assert [end.num_nans_in_logits for end in ends] == [0, 0]
    assert {end.finish_reason for end in ends} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_metrics_of_such_a_request_are_corrupted(few):
    with LLM(str(few), disable_log_stats=False, **ARGS) as llm:
        [output] = llm.generate("a", PLAIN, use_tqdm=False)
        assert output.metrics.is_corrupted
        allowed = SamplingParams(max_tokens=2, allowed_token_ids=[7, 8])
        [output] = llm.generate("a", allowed, use_tqdm=False)
        assert not output.metrics.is_corrupted
