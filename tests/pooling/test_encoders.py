"""Encoders through the engine: vectors, labels, the longest prompt, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from quire import LLM, PoolingParams
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import InvalidParameter, LoadError, RequestError
from tests.models.hostile.encoders import ENCODERS, make_encoder

LENGTHS = {"max_num_batched_tokens": 100}
"""Two steps for the prompts of a model, with the longest of 64 tokens."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes each checkpoint once."""
    found = {}

    def make(name):
        if name not in found:
            found[name] = make_encoder(ENCODERS[name], tmp_path_factory.mktemp(name) / "model")
        return found[name]

    return make


def open_llm(made, **options):
    options = {"dtype": "float32", "skip_tokenizer_init": True, **options}
    return LLM(str(made.folder), **options)


def plan_of(made, **options):
    options = {"dtype": "float32", "skip_tokenizer_init": True, **options}
    return make_plan(EngineArgs(model=str(made.folder), **options))


def params_of(made, task, **options):
    return [
        PoolingParams(
            task=task,
            extra_kwargs=None if second is None else {"compressed_token_type_ids": second},
            **options,
        )
        for second in made.seconds
    ]


def encode(made, task, prompts=None, params=None, **options):
    params = params or params_of(made, task, use_activation=False)
    with open_llm(made, **options) as llm:
        outputs = llm.encode(prompts or made.prompts, params, pooling_task=task, use_tqdm=False)
    return [torch.as_tensor(output.outputs.data) for output in outputs]


@pytest.mark.parametrize("name", ["BertModel", "RobertaForMaskedLM", "gemma3"])
def test_vectors_equal_the_first_hidden_states(made, name):
    model = made(name)
    pooling = {"pooler_config": {"seq_pooling_type": "CLS"}, "runner": "pooling"}
    found = encode(model, "embed", **pooling, **LENGTHS)
    for vector, states in zip(found, model.hidden, strict=True):
        torch.testing.assert_close(vector, states[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("BertForSequenceClassification", "classify"),
        ("BertForTokenClassification", "token_classify"),
        ("RobertaForSequenceClassification", "classify"),
        ("DistilBertForSequenceClassification", "classify"),
        ("modernbert-biased", "classify"),
        ("ModernBertForTokenClassification", "token_classify"),
        ("AlbertForSequenceClassification", "classify"),
        ("EuroBertForSequenceClassification", "classify"),
        ("DebertaV2ForSequenceClassification", "classify"),
        ("T5ForTokenClassification", "token_classify"),
        pytest.param("MPNetForSequenceClassification", "classify", marks=pytest.mark.full),
        pytest.param("eurobert-biased", "classify", marks=pytest.mark.full),
        pytest.param("ElectraForSequenceClassification", "classify", marks=pytest.mark.full),
        pytest.param("ElectraForTokenClassification", "token_classify", marks=pytest.mark.full),
        pytest.param("NomicBertForSequenceClassification", "classify", marks=pytest.mark.full),
        pytest.param("GteForSequenceClassification", "classify", marks=pytest.mark.full),
        pytest.param("XLMRobertaForTokenClassification", "token_classify", marks=pytest.mark.full),
        pytest.param("CamembertForSequenceClassification", "classify", marks=pytest.mark.full),
    ],
)
def test_labels_equal_those_of_transformers(made, name, task):
    model = made(name)
    found = encode(model, task, max_model_len=64, **LENGTHS)
    for logits, expected in zip(found, model.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_has_the_same_bits_alone_and_in_a_crowd(made):
    model = made("BertForTokenClassification")
    together = encode(model, "token_classify", **LENGTHS)
    params = params_of(model, "token_classify", use_activation=False)
    with open_llm(model) as llm:
        for prompt, own, found in zip(model.prompts, params, together, strict=True):
            (alone,) = llm.encode(prompt, own, pooling_task="token_classify", use_tqdm=False)
            assert torch.equal(torch.as_tensor(alone.outputs.data), found)


def test_types_of_tokens_come_with_a_prompt_too(made):
    """As a list, in place of the place where the 1s begin; ids and types are cut alike."""
    model = made("BertForSequenceClassification")
    wanted = encode(model, "classify")
    prompts = [
        {
            "prompt_token_ids": ids,
            "token_type_ids": [int(second is not None and i >= second) for i in range(len(ids))],
        }
        for ids, second in zip(model.prompts, model.seconds, strict=True)
    ]
    plain = PoolingParams(use_activation=False)
    assert all(map(torch.equal, encode(model, "classify", prompts, plain), wanted))
    second = model.seconds[0]
    whole, cut = model.prompts[0], {"truncate_prompt_tokens": 16, "truncation_side": "left"}
    first = len(whole) - 16
    with open_llm(model) as llm:
        [found] = llm.classify(
            prompts[0], pooling_params=plain, tokenization_kwargs=cut, use_tqdm=False
        )
        params = PoolingParams(
            use_activation=False, extra_kwargs={"compressed_token_type_ids": second - first}
        )
        [right] = llm.classify([whole[first:]], pooling_params=params, use_tqdm=False)
        with pytest.raises(InvalidParameter, match="extra_kwargs.* says it, too"):
            llm.classify(prompts[0], pooling_params=params, use_tqdm=False)
    assert found.outputs == right.outputs and second > first


def test_types_that_a_model_does_not_have(made):
    prompt = {"prompt_token_ids": [5, 6], "token_type_ids": [0, 1]}
    told = "tokens of a second text have no type of their own in this model"
    for name in ("RobertaForSequenceClassification", "DistilBertForSequenceClassification"):
        with open_llm(made(name)) as llm:
            with pytest.raises(InvalidParameter, match=f"token_type_ids.*{told}"):
                llm.classify(prompt, use_tqdm=False)
            params = PoolingParams(extra_kwargs={"compressed_token_type_ids": 1})
            with pytest.raises(InvalidParameter, match=f"compressed_token_type_ids=1 .*{told}"):
                llm.classify([[5, 6]], pooling_params=params, use_tqdm=False)
            llm.classify({**prompt, "token_type_ids": [0, 0]}, use_tqdm=False)
    with open_llm(made("llama"), runner="pooling") as llm, pytest.raises(InvalidParameter):
        llm.embed(prompt, use_tqdm=False)


def test_positions_of_roberta_begin_behind_those_of_padding(made):
    model = made("RobertaForMaskedLM")
    assert plan_of(model).model.max_model_len == 64  # of 68 rows, the last 64
    with open_llm(model) as llm, pytest.raises(RequestError, match="64"):
        llm.embed([[5] * 65], use_tqdm=False)


def test_the_plan_is_weights_and_activations(made):
    plan = plan_of(made("BertModel"))
    assert (plan.memory.num_blocks, plan.memory.kv_cache_bytes) == (1, 0)
    assert not plan.memory.enable_prefix_caching and not plan.steps.enable_chunked_prefill


def test_a_step_has_room_for_the_longest_prompt(made, tmp_path):
    model = made("DistilBertModel")
    assert plan_of(model, max_num_seqs=2).steps.max_num_batched_tokens >= 64
    with pytest.raises(InvalidParameter, match="max_model_len=64"):
        plan_of(model, max_num_batched_tokens=63)
    longer = model.folder.parent / "longer"
    shutil.copytree(model.folder, longer)
    path = longer / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 20000}))
    assert plan_of(replace(model, folder=longer)).steps.max_num_batched_tokens == 20000


@pytest.mark.parametrize(
    "option",
    [
        {"enable_chunked_prefill": True},
        {"enable_prefix_caching": True},
        {"num_gpu_blocks_override": 8},
        {"kv_cache_memory_bytes": 2**20},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_what_is_not_kept_are_refused_by_name(made, option):
    with pytest.raises(InvalidParameter, match=next(iter(option))):
        plan_of(made("BertModel"), **option)


def test_a_generator_that_sees_what_follows_is_refused(made, tmp_path):
    model = made("llama")
    folder = tmp_path / "model"
    shutil.copytree(model.folder, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError, match="is_causal"):
        plan_of(replace(model, folder=folder))
    assert plan_of(replace(model, folder=folder), runner="pooling").model.pooler is not None
