"""One engine that generates and pools: the texts and the vectors are those of two engines, in every
bit, whatever runs in the same steps.
"""

import pytest
import torch

from quire import LLM, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from quire.errors import InvalidParameter, InvalidType, LoadError, RequestError
from quire.hardware.native import find_native
from tests.models.hostile.encoders import ENCODERS, make_encoder
from tests.pooling import models

native = pytest.mark.skipif(
    find_native()[0] is None, reason="plain torch promises no equal bits in another batch"
)
QUIET = {"use_tqdm": False}
ASKED = models.prompts(seed=8, lengths=(5, 40, 100, 1, 33))
DRAWN = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=1)
TOKENS = {
    "hf_overrides": {"classifier_from_token": ["a", "b"], "method": "from_2_way_softmax"},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("both")
    models.make(path, "Qwen3", "ForCausalLM", tie_word_embeddings=request.param)
    return str(path)


def both(folder, convert="embed", **options):
    fixed = {"runner": "generate", "convert": convert, "dtype": "float32"}
    return {"model": folder, **fixed, "max_num_batched_tokens": 48, **options}


def apart(folder, convert, **options):
    """What an engine for each makes of the prompts."""
    with LLM(folder, dtype="float32") as llm:
        texts = llm.generate(ASKED, DRAWN, **QUIET)
    with LLM(folder, dtype="float32", runner="pooling", convert=convert, **options) as llm:
        pooled = llm.encode(ASKED, pooling_task=convert, **QUIET)
    return [drawn(output) for output in texts], [output.outputs.data for output in pooled]


def drawn(output):
    completion = output.outputs[0]
    return list(completion.token_ids), completion.cumulative_logprob


@native
@pytest.mark.parametrize(
    ("convert", "options"),
    [
        ("embed", {}),
        ("embed", {"pooler_config": {"pooling_type": "MEAN"}}),
        ("classify", TOKENS),
    ],
    ids=["last", "mean", "yes or no"],
)
def test_both_are_those_of_two_engines(folder, convert, options):
    texts, pooled = apart(folder, convert, **options)
    engine = LLMEngine.from_engine_args(EngineArgs(**both(folder, convert, **options)))
    assert engine.get_supported_tasks()[:2] == ("generate", convert)
    for place, ids in enumerate(ASKED):  # in the same steps, and each once more after the other
        for again in "ab":
            engine.add_request(f"{again}t{place}", ids, DRAWN)
            engine.add_request(f"{again}p{place}", ids, PoolingParams(task=convert))
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    engine.close()
    for place, (text, values) in enumerate(zip(texts, pooled, strict=True)):
        for again in "ab":
            assert drawn(found[f"{again}t{place}"]) == text
            data = torch.as_tensor(found[f"{again}p{place}"].outputs.data)
            assert torch.equal(data, values)


@native
def test_a_prefix_of_one_serves_the_other(folder):
    _, pooled = apart(folder, "embed")
    with LLM(**both(folder)) as llm:
        llm.generate(ASKED, DRAWN, **QUIET)
        found = llm.embed(ASKED, **QUIET)
        texts = llm.generate(ASKED, DRAWN, **QUIET)
    assert [output.num_cached_tokens for output in found] == [0, 32, 96, 0, 32]
    for output, values in zip(found, pooled, strict=True):
        assert torch.equal(torch.tensor(output.outputs.embedding), values)
    assert texts[2].num_cached_tokens == 96


def test_calls_of_the_wrong_kind(folder):
    with LLM(**both(folder)) as llm:
        assert llm.generate("a text", **QUIET)[0].outputs[0].token_ids
        with pytest.raises(InvalidType, match="sampling_params"):
            llm.generate("a text", PoolingParams(), **QUIET)
        with pytest.raises(InvalidType, match="pooling_params"):
            llm.embed("a text", pooling_params=SamplingParams(), **QUIET)
        with pytest.raises(InvalidType, match="it must be a SamplingParams or PoolingParams"):
            llm.llm_engine.add_request("0", "a text", {"max_tokens": 3})
        with pytest.raises(InvalidParameter, match="not supported by this model, which serves"):
            llm.classify("a text", **QUIET)
        score = llm.score("a text", ["another", "a text"], **QUIET)
        assert score[1].outputs.score == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        ("Model", {}, InvalidParameter, "Qwen3Model has no language-model head"),
        ("ForCausalLM", {"hf_overrides": {"is_causal": False}}, LoadError, "is_causal=False"),
        ("ForCausalLM", {"convert": "classify"}, LoadError, "missing score.weight"),
        (
            "ForCausalLM",
            {"spec_method": "ngram", "spec_tokens": 2},
            InvalidParameter,
            "nothing is drafted in an engine that pools",
        ),
    ],
    ids=["no head", "sees all", "no labels", "drafts"],
)
def test_what_cannot_do_both(tmp_path, kind, options, error, text):
    models.make(tmp_path, "Qwen3", kind)
    with pytest.raises(error, match=text):
        LLM(**both(str(tmp_path), **options))


def test_an_encoder_does_not_generate(tmp_path):
    make_encoder(ENCODERS["BertModel"], tmp_path)
    with pytest.raises(RequestError, match="BertModel has no language-model head"):
        LLM(**both(str(tmp_path)), skip_tokenizer_init=True)
