"""`LLM` on the embedded model: against transformers, against itself in a crowd, on bad input."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, embedded
from quire.errors import EngineDeadError, LoadError, RequestError

PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self"]


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", max_num_seqs=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float32).eval()


def generate(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def ids(outputs):
    return [list(completion.token_ids) for o in outputs for completion in o.outputs]


@torch.no_grad()
def log_probs(reference, token_ids):
    """[len, V] fp32: row i is the distribution of the token behind the first i + 1."""
    return reference(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def test_logprobs_are_those_of_transformers(llm, reference):
    outputs = generate(llm, PROMPTS, temperature=0.0, max_tokens=12, logprobs=4, prompt_logprobs=2)
    for output in outputs:
        prompt, [completion] = output.prompt_token_ids, output.outputs
        right = log_probs(reference, prompt + list(completion.token_ids))
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        everything = output.prompt_logprobs[1:] + completion.logprobs
        tokens = prompt[1:] + list(completion.token_ids)
        for place, (entries, token) in enumerate(zip(everything, tokens, strict=True)):
            row = right[place]
            assert next(iter(entries)) == token
            for token_id, entry in entries.items():
                assert entry.logprob == pytest.approx(row[token_id].item(), abs=2e-3)
            assert entries[token].rank == int((row > row[token] + 1e-4).sum()) + 1
        total = sum(c[t].logprob for c, t in zip(completion.logprobs, completion.token_ids))  # noqa: B905
        assert completion.cumulative_logprob == pytest.approx(total)


def scored(prompt, start):
    """Chosen ids for each token of a prompt after the first and `start`, some rows shorter; the
    tokens of the prompt are among them.
    """
    table = [[prompt[i + 1], 7, 300 + i, 3000 - i] for i in range(start, len(prompt) - 1)]
    return [row[: 1 + place % 4] for place, row in enumerate(table)]


def scores_of(llm, prompts, start, **params):
    asked = [
        SamplingParams(
            max_tokens=2, temperature=0.0, prompt_logprob_start=start or None,
            prompt_logprob_token_ids=scored(prompt, start), **params,
        )
        for prompt in prompts
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    return [output.prompt_token_id_logprobs for output in outputs], outputs


def test_scores_of_chosen_ids_are_those_of_transformers(llm, reference):
    prompts = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    for start in (0, 2):
        found, outputs = scores_of(llm, prompts, start, prompt_logprobs=0)
        for prompt, scores, output in zip(prompts, found, outputs, strict=True):
            rows, right = scored(prompt, start), log_probs(reference, prompt)
            assert scores.dtype == np.float32
            assert scores.shape == (len(prompt) - 1 - start, max(map(len, rows)))
            for place, (row, values) in enumerate(zip(rows, scores.tolist(), strict=True)):
                expected = right[start + place][row].tolist()
                assert values[: len(row)] == pytest.approx(expected, abs=2e-3)
                assert all(value == -math.inf for value in values[len(row) :])
                own = output.prompt_logprobs[start + place + 1][row[0]]
                assert values[0] == own.logprob


def test_scores_of_chosen_ids_do_not_depend_on_chunks_or_company(llm):
    prompts = [llm.get_tokenizer().encode(prompt * 4) for prompt in PROMPTS]
    whole, _ = scores_of(llm, prompts, 2)
    with LLM(dtype="float32", max_num_seqs=4, max_num_batched_tokens=7) as other:
        parts, _ = scores_of(other, prompts[:2] + prompts, 2)
    for expected, found in zip(whole[:2] + whole, parts, strict=True):
        assert np.array_equal(expected, found)


def test_an_array_of_chosen_ids_is_taken_as_lists_are(llm):
    ids = np.array([[5, -1], [6, 7]], dtype=">i8")
    params = SamplingParams(max_tokens=1, prompt_logprob_token_ids=ids)
    [output] = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    scores = output.prompt_token_id_logprobs
    assert scores.shape == (2, 2) and scores[0, 1] == -math.inf
    params.prompt_logprob_token_ids = [[5], [6, 7]]
    [again] = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    assert np.array_equal(again.prompt_token_id_logprobs, scores)


def test_greedy_text_is_that_of_transformers(llm, reference):
    [output] = generate(llm, PROMPTS[0], temperature=0.0, max_tokens=48)
    tokens = list(output.outputs[0].token_ids)
    prompt = output.prompt_token_ids
    right = log_probs(reference, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert tokens == right
    assert llm.get_tokenizer().decode(tokens) == output.outputs[0].text


SEEDED = {"temperature": 1.0, "top_p": 0.95, "seed": 5, "max_tokens": 24, "logprobs": 1}


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(llm):
    alone = [generate(llm, prompt, **SEEDED)[0] for prompt in PROMPTS]
    crowd = generate(llm, PROMPTS * 4, **SEEDED)
    assert ids(crowd) == ids(alone) * 4


def test_one_step_ahead_and_a_tiny_pool_change_nothing(llm):
    plain = generate(llm, PROMPTS, **SEEDED)
    greedy = generate(llm, PROMPTS, temperature=0.0, max_tokens=40)
    small = {"dtype": "float32", "block_size": 16, "max_model_len": 128, "max_num_seqs": 4}
    for args in (
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 7},
        {"enable_prefix_caching": False, "async_scheduling": True, "num_gpu_blocks_override": 10},
    ):
        with LLM(**{**small, **args}) as other:
            assert ids(generate(other, PROMPTS, **SEEDED)) == ids(plain), args
            assert ids(generate(other, PROMPTS, temperature=0.0, max_tokens=40)) == ids(greedy)


def test_penalties_and_processors_survive_preemption(llm):
    params = {
        "temperature": 0.7, "seed": 1, "max_tokens": 40, "repetition_penalty": 1.3,
        "presence_penalty": 0.4, "min_tokens": 8, "bad_words": ["self"], "logit_bias": {300: 2.0},
    }  # fmt: skip
    tight = {"max_model_len": 96, "block_size": 16, "num_gpu_blocks_override": 8}
    with LLM(dtype="float32", max_num_seqs=3, disable_log_stats=False, **tight) as small:
        crowded = generate(small, PROMPTS, **params)
        assert any(m.name.endswith("preemptions") and m.value > 0 for m in small.get_metrics())
    assert ids(crowded) == ids(generate(llm, PROMPTS, **params))
    assert all("self" not in output.outputs[0].text for output in crowded)


def test_a_custom_processor_that_raises_costs_only_its_request():
    from quire import AdapterLogitsProcessor

    class Mute(ValueError):
        def __str__(self):
            raise RuntimeError("it says nothing")

    class Picky(AdapterLogitsProcessor):
        @classmethod
        def validate_params(cls, sampling_params):
            if isinstance((sampling_params.extra_args or {}).get("fails_at"), str):
                raise (
                    Mute
                    if sampling_params.extra_args["fails_at"] == "mute"
                    else ValueError("fails_at is a number")
                )

        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            if not (params.extra_args or {}).get("fails_at"):
                return None

            def process(output_ids, logits):
                if len(output_ids) == params.extra_args["fails_at"]:
                    raise RuntimeError("picky")
                return logits

            return process

    with LLM(dtype="float32", logits_processors=[Picky]) as engine:
        params = [SamplingParams(temperature=0.0, max_tokens=8) for _ in PROMPTS]
        good = ids(engine.generate(PROMPTS, params, use_tqdm=False))
        params[1] = SamplingParams(temperature=0.0, max_tokens=8, extra_args={"fails_at": 3})
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        refused = SamplingParams(extra_args={"fails_at": "never"})
        with pytest.raises(RequestError, match="^fails_at is a number$"):
            engine.generate(PROMPTS, refused, use_tqdm=False)
        with pytest.raises(RequestError, match="^Mute$"):
            engine.generate(
                PROMPTS, SamplingParams(extra_args={"fails_at": "mute"}), use_tqdm=False
            )
        assert ids(engine.generate(PROMPTS[:1], params[0], use_tqdm=False)) == good[:1]
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"]
    assert list(outputs[1].outputs[0].token_ids) == good[1][:3]
    assert ids(outputs)[0] == good[0] and ids(outputs)[2] == good[2]


BAD = {
    "empty ids": ({"prompt_token_ids": []}, {}),
    "prompt longer than the model": ({"prompt_token_ids": [5] * 5000}, {}),
    "prompt that leaves no room": ({"prompt_token_ids": [5] * 4096}, {}),
    "id outside the vocabulary": ({"prompt_token_ids": [5, 10**6]}, {}),
    "negative id": ({"prompt_token_ids": [-1]}, {}),
    "stop id outside the vocabulary": ("x", {"stop_token_ids": [10**6]}),
    "allowed id outside the vocabulary": ("x", {"allowed_token_ids": [10**6]}),
    "bias outside the vocabulary": ("x", {"logit_bias": {10**6: 1.0}}),
    "too many logprobs": ("x", {"logprobs": 21}),
    "too many prompt logprobs": ("x", {"prompt_logprobs": 21}),
    "scores of another prompt": ("x y z", {"prompt_logprob_token_ids": [[1]] * 40}),
    "scores of too many ids": ("x y", {"prompt_logprob_token_ids": [[1] * 21]}),
    "grammar": ("x", {"structured_outputs": {"regex": "(a"}}),
    "unknown key of a prompt": ({"prompt": "x", "prompts": "y"}, {}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_and_the_engine_goes_on(llm, name):
    prompt, params = BAD[name]
    before = ids(generate(llm, PROMPTS[:1], temperature=0.0, max_tokens=3))
    with pytest.raises((RequestError, ValueError, TypeError)) as caught:
        if "structured_outputs" in params:
            from quire.params import StructuredOutputsParams

            params = {"structured_outputs": StructuredOutputsParams(**params["structured_outputs"])}
        generate(llm, [PROMPTS[0], prompt], max_tokens=3, **params)
    assert len(str(caught.value)) > 20
    assert not llm.llm_engine.has_unfinished_requests()
    assert ids(generate(llm, PROMPTS[:1], temperature=0.0, max_tokens=3)) == before


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def without_config(folder):
    (folder / "config.json").unlink()


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BAD_MODELS = {
    "no config": (without_config, "config.json"),
    "truncated weights": (truncated, "safetensors"),
    "unknown architecture": (lambda f: edited(f, architectures=["FooForCausalLM"]), "Foo"),
    "unmet key": (lambda f: edited(f, sliding_window=16), "sliding_window"),
    "other width": (lambda f: edited(f, intermediate_size=100), "shape"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_are_one_clear_error(name, tmp_path):
    spoil, text = BAD_MODELS[name]
    folder = tmp_path / "model"
    shutil.copytree(embedded.path(), folder)
    spoil(folder)
    with pytest.raises(LoadError, match=text):
        LLM(str(folder))


def test_a_model_that_is_nowhere(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError, match="no/such-model"):
        LLM("no/such-model")


def test_closing_gives_the_memory_back_and_ends_all(llm):
    other = LLM(dtype="float32")
    other.enqueue(PROMPTS, SamplingParams(max_tokens=5), use_tqdm=False)
    other.close()
    with pytest.raises(EngineDeadError, match="closed"):
        other.generate("x", use_tqdm=False)
