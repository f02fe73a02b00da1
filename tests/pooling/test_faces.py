"""What callers of a pooling engine see: outputs, errors in a sentence, edges of inputs."""

import asyncio

import numpy as np
import pytest
import torch

import quire
from quire import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, PoolingParams
from quire.config.pooler_config import PoolerConfig
from quire.errors import (
    EngineError,
    InvalidParameter,
    InvalidType,
    PromptTooLong,
    RequestError,
)
from quire.params.pooling import QueryVectors
from tests.pooling import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedder")
    models.make(path, "Qwen3", "Model")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32", disable_log_stats=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("reranker")
    models.make(path, "Qwen2", "ForSequenceClassification", num_labels=1)
    with LLM(str(path), dtype="float32") as llm:
        yield llm


def refusal(kind, call, *arguments, **options):
    with pytest.raises(kind) as caught:
        call(*arguments, use_tqdm=False, **options)
    return str(caught.value)


def test_texts_and_ids_are_the_same(llm):
    text = "The quick brown fox"
    ids = llm.get_tokenizer().encode(text)
    by_text, by_ids = llm.embed([text, ids], use_tqdm=False)
    assert by_text.outputs == by_ids.outputs and by_text.prompt_token_ids == ids
    assert isinstance(by_text, quire.EmbeddingRequestOutput)
    assert by_text.outputs.hidden_size == 48


CALLS = {
    "embed": lambda llm: llm.embed(["a", "b"], use_tqdm=False),
    "encode": lambda llm: llm.encode(["a", "b"], pooling_task="embed", use_tqdm=False),
    "score": lambda llm: llm.score("a", ["b", "c"], use_tqdm=False),
    "classify": lambda llm: llm.classify(["a", "b"], use_tqdm=False),
    "pair": lambda llm: llm.score("a", ["b", "c"], use_tqdm=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_while_asleep_leaves_nothing_queued(llm, reranker, name):
    engine = reranker if name in ("classify", "pair") else llm
    engine.sleep(level=0)
    with pytest.raises(EngineError, match="the engine is asleep"):
        CALLS[name](engine)
    engine.wake_up()
    assert not engine.llm_engine.has_unfinished_requests()
    assert len(CALLS[name](engine)) == 2 and engine.wait_for_completion(use_tqdm=False) == []


def test_the_longest_prompt_and_longer_ones(llm):
    [ids] = models.prompts(lengths=(170,))
    assert llm.embed([ids[:160]], use_tqdm=False)[0].outputs.hidden_size == 48
    with pytest.raises(PromptTooLong, match="maximum context length is 160 tokens, and the"):
        llm.embed([ids[:161]], use_tqdm=False)
    for side, kept in (("left", ids[-160:]), ("right", ids[:160])):
        cut = {"truncate_prompt_tokens": -1, "truncation_side": side}
        [output] = llm.embed([ids], tokenization_kwargs=cut, use_tqdm=False)
        assert output.prompt_token_ids == kept
    [output] = llm.embed(
        "one two three four five six", tokenization_kwargs={"truncate_prompt_tokens": 3},
        use_tqdm=False,
    )  # fmt: skip
    assert len(output.prompt_token_ids) == 3
    for number in (161, 0, -2):
        cut = {"truncate_prompt_tokens": number}
        assert refusal(InvalidParameter, llm.embed, "a", tokenization_kwargs=cut) == (
            f"truncate_prompt_tokens={number} is not allowed: it must be -1, or a number of tokens "
            "from 1 to max_model_len=160."
            + (" Please request a smaller truncation size." if number > 160 else "")
        )


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "text"),
    [
        ([], {}, InvalidParameter, "prompts=[] is not allowed: you must pass at least one prompt."),
        ([[]], {}, InvalidParameter, "prompt=[] is not allowed: it must have at least one token."),
        ("", {}, InvalidParameter, "prompt='' is not allowed: it must have at least one token."),
        ([[5, 320]], {}, InvalidParameter, "prompt_token_ids=320 is not allowed"),
        (
            "a",
            {"pooling_params": quire.SamplingParams()},
            InvalidType,
            "it must be a PoolingParams, or a list of them.",
        ),
        (
            ["a", "b"],
            {"pooling_params": [PoolingParams()]},
            InvalidParameter,
            "pooling_params='<1 items>' is not allowed: it must be one value for all, or one for "
            "each of the 2 prompts.",
        ),
        (
            "a",
            {"pooling_params": PoolingParams(task="classify")},
            InvalidParameter,
            "task='classify' is not allowed: this call asks for 'embed'.",
        ),
        (
            "a",
            {"pooling_params": PoolingParams(dimensions=47)},
            InvalidParameter,
            "does not support Matryoshka embeddings, so that dimensions must be left out.",
        ),
        (
            "a",
            {"pooling_params": PoolingParams(task="embed"), "tokenization_kwargs": {"padding": 1}},
            RequestError,
            "padding=1 is not allowed",
        ),
        (
            "a",
            {"pooling_params": PoolingParams(step_tag_id=3)},
            InvalidParameter,
            "step_tag_id=3 is not allowed: the task embed of this model does not take it: it "
            "belongs to STEP.",
        ),
    ],
)
def test_refusals_of_inputs(llm, prompts, options, kind, text):
    assert text in refusal(kind, llm.embed, prompts, **options)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.embed("a", use_tqdm=False)[0].error is None


def test_refusals_of_tasks(llm, reranker):
    assert refusal(InvalidParameter, llm.classify, "a") == (
        "pooling_task='classify' is not allowed: the Classification API is not supported by this "
        "model, which serves embed and token_embed. Start it with convert='classify', or a model "
        "of labels."
    )
    assert refusal(InvalidParameter, llm.encode, "a") == (
        "pooling_task=None is not allowed: it must be given, and this model serves 'embed'."
    )
    assert refusal(InvalidParameter, llm.encode, "a", pooling_task="token_embed") == (
        "pooling_task='token_embed' is not allowed: the engine serves 'embed'. Try switching "
        "the model's pooling_task via pooler_config={'task': 'token_embed'}."
    )
    assert "No IOProcessor plugin" in refusal(
        InvalidParameter, llm.encode, "a", pooling_task="plugin"
    )
    assert "Use classify." in refusal(InvalidParameter, llm.encode, "a", pooling_task="score")
    assert "convert='embed'" in refusal(InvalidParameter, reranker.embed, "a")
    with pytest.raises(RequestError, match="This engine pools prompts"):
        llm.generate("a", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"runner": "generate"}, "Qwen3Model has no language-model head"),
        ({"convert": "classify"}, "Qwen3Model is a pooler already, of embed, token_embed"),
        ({"pooler_config": {"task": "classify"}}, "this model can do embed, token_embed"),
        ({"pooler_config": {"normalize": True}}, "Its name is use_activation."),
        ({"pooler_config": {"pooling_type": "MAX"}}, "its fields are task"),
        ({"pooler_config": {"logit_sigma": 0}}, "it divides"),
        ({"pooler_config": {"dimensions": 8}}, "Matryoshka"),
        (
            {"pooler_config": {"pooling_type": "LAST", "tok_pooling_type": "ALL"}},
            "Give one of them.",
        ),
        ({"logits_processors": ["a:B"]}, "of a model that pools"),
    ],
)
def test_refusals_of_options(folder, options, text):
    with pytest.raises(RequestError) as caught:
        LLM(folder, **options)
    assert text in str(caught.value)


def test_params_of_a_caller_are_not_changed(llm):
    params = PoolingParams()
    llm.embed("a", pooling_params=params, use_tqdm=False)
    assert params == PoolingParams()


def test_sizes_that_a_config_declares(folder, llm):
    whole = np.array(llm.embed([[5, 6, 7]], use_tqdm=False)[0].outputs.embedding)
    sizes = {"hf_overrides": {"matryoshka_dimensions": [8, 16]}, "dtype": "float32"}
    with LLM(folder, pooler_config={"dimensions": 8}, **sizes) as cut:
        for params, size in ((None, 8), (PoolingParams(dimensions=16), 16)):
            [output] = cut.embed([[5, 6, 7]], pooling_params=params, use_tqdm=False)
            wanted = whole[:size] / np.linalg.norm(whole[:size])
            assert output.outputs.embedding == pytest.approx(wanted.tolist(), abs=1e-6)
        for size, text in ((12, "the sizes are 8, 16."), (49, "vectors have from 1 to 48 numbers")):
            params = PoolingParams(dimensions=size)
            assert text in refusal(InvalidParameter, cut.embed, "a", pooling_params=params)
    with pytest.raises(InvalidParameter, match="the sizes are 8, 16"):
        LLM(folder, pooler_config={"dimensions": 12}, **sizes)


def test_a_head_in_the_model_s_dtype(tmp_path):
    model = models.make(tmp_path, "Qwen3", "ForSequenceClassification", num_labels=3)
    asked, found = models.prompts(seed=8), []
    for overrides in ({}, {"head_dtype": "model"}):
        with LLM(str(tmp_path), dtype="bfloat16", hf_overrides=overrides) as llm:
            params = PoolingParams(use_activation=False)
            outputs = llm.classify(asked, pooling_params=params, use_tqdm=False)
            found.append(np.array([output.outputs.probs for output in outputs]))
    wide, narrow = found
    assert np.array_equal(narrow, torch.tensor(narrow).bfloat16().float().numpy())
    assert not np.array_equal(wide, narrow)
    np.testing.assert_allclose(narrow, wide, rtol=2**-7, atol=2**-6)
    with torch.inference_mode():
        exact = [model(torch.tensor([ids])).logits[0].tolist() for ids in asked]
    scale = np.abs(exact).max()
    assert np.abs(wide - exact).max() < 0.05 * scale


def test_many_inputs_in_one_call(folder):
    draw = np.random.default_rng(0)
    asked = [draw.integers(5, 300, n).tolist() for n in draw.integers(1, 6, 10_000)]
    with LLM(folder, dtype="float32") as llm:
        outputs = llm.embed(asked, use_tqdm=False)
        some = llm.embed([asked[i] for i in (0, 4321, 9999)], use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == asked
    assert [o.outputs for o in some] == [outputs[i].outputs for i in (0, 4321, 9999)]


def test_metrics(llm):
    def count(name):
        found = [m for m in llm.get_metrics() if m.name == name]
        return sum(getattr(m, "value", getattr(m, "count", 0)) for m in found)

    names = ("vllm:request_success", "vllm:prompt_tokens", "vllm:time_to_first_token_seconds")
    before = [count(name) for name in names]
    llm.embed([[5, 6, 7], [8, 9]], use_tqdm=False)
    assert [count(name) for name in names] == [before[0] + 2, before[1] + 5, before[2] + 2]
    assert count("vllm:generation_tokens") == 0


def test_steps_of_an_engine(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(folder, dtype="float32"))
    assert engine.get_supported_tasks() == ("embed", "token_embed")
    engine.add_request("a", [5, 6, 7], PoolingParams(task="embed"))
    engine.add_request("b", [5, 6, 7], PoolingParams())
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs.data for output in engine.step()}
    assert found["a"].shape == (48,) and found["b"].shape == (3, 48), "without a task: of tokens"
    assert np.array_equal(found["b"][-1], found["a"])
    engine.add_request("c", [5, 6, 7], PoolingParams(task="embed"))
    engine.abort_request("c")
    [aborted] = engine.step()
    assert aborted.finished and aborted.error == "the request was aborted"
    assert aborted.outputs.data.shape == (0,)
    engine.close()


def test_a_core_in_another_process(folder, llm):
    asked = models.prompts(seed=7)

    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, dtype="float32"))

        async def one(name, ids, task):
            async for output in engine.encode(ids, PoolingParams(task=task), name):
                assert output.finished and output.request_id == name
            return output.outputs.data

        try:
            calls = [one(str(i), ids, "embed") for i, ids in enumerate(asked)]
            vectors = await asyncio.gather(*calls, one("t", asked[3], "token_embed"))
            with pytest.raises(RequestError, match="This engine pools prompts"):
                await anext(engine.generate([5], quire.SamplingParams(), "g"))
            with pytest.raises(InvalidType, match="sampling_params.*encode.. PoolingParams"):
                await anext(engine.generate([5], PoolingParams(task="embed"), "p"))
            made = engine.input_processor.process_inputs("q", [5], PoolingParams(task="embed"))
            with pytest.raises(InvalidType, match="sampling_params.*encode.. PoolingParams"):
                await anext(engine.generate(made, None, "q"))
            with pytest.raises(InvalidType, match="pooling_params.*encode.. PoolingParams"):
                await anext(engine.encode([5], quire.SamplingParams(), "s"))
            assert await engine.get_supported_tasks() == ("embed", "token_embed")
            return vectors
        finally:
            engine.shutdown()

    *vectors, tokens = asyncio.run(run())
    wanted = llm.embed(asked, use_tqdm=False)
    for vector, output in zip(vectors, wanted, strict=True):
        assert vector.tolist() == output.outputs.embedding
    assert tokens.shape == (len(asked[3]), 48)


def test_cosines(llm):
    texts = ["a fox", "a dog", "the fox"]
    first, *rest = llm.embed(texts, use_tqdm=False)
    wanted = [np.dot(first.outputs.embedding, one.outputs.embedding) for one in rest]
    scores = llm.score(texts[0], texts[1:], use_tqdm=False)
    assert [s.outputs.score for s in scores] == pytest.approx(wanted, abs=1e-6)
    pairs = llm.score(
        [texts[0], texts[1], texts[0]], [texts[1], texts[1], texts[2]], use_tqdm=False
    )
    found = [s.outputs.score for s in pairs]
    assert found == pytest.approx([wanted[0], 1.0, wanted[1]], abs=1e-6)
    assert pairs[1].prompt_token_ids == 2 * llm.get_tokenizer().encode(texts[1])


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (["a", "b"], ["a", "b", "c"], "input lengths must be either 1:1, 1:N or N:N"),
        ([], ["a"], "at least one text element must be given"),
        ("a", [], "at least one text_pair element must be given"),
        ({"content": []}, "a", "it must be a string"),
        (["a"], [3.0], "each item must be a text"),
    ],
)
def test_refusals_of_pairs(llm, first, second, text):
    assert text in refusal(RequestError, llm.score, first, second)


def test_labels_of_pairs(reranker):
    documents = ["a cat", "a dog and a cat"]
    scores = reranker.score("what is it? ", documents, use_tqdm=False)
    whole = reranker.classify(["what is it? " + one for one in documents], use_tqdm=False)
    assert [s.outputs.score for s in scores] == [one.outputs.probs[0] for one in whole]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    [score] = reranker.score("q", "d", chat_template=template, use_tqdm=False)
    [one] = reranker.classify("<query>q<document>d", use_tqdm=False)
    assert score.outputs.score == one.outputs.probs[0]


def test_texts_of_pairs_are_cut(reranker):
    long = "one two three four five six seven eight"
    extra = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    params = PoolingParams(extra_kwargs=extra)
    [score] = reranker.score(long, long, pooling_params=params, use_tqdm=False)
    tokenizer = reranker.get_tokenizer()
    cut = [tokenizer.decode(tokenizer.encode(long)[:n]) for n in (2, 3)]
    [one] = reranker.classify("".join(cut), use_tqdm=False)
    assert score.outputs.score == one.outputs.probs[0]
    params = PoolingParams(extra_kwargs={"max_tokens_per_doc": 160})
    assert "below max_model_len=160" in refusal(
        InvalidParameter, reranker.score, "a", "b", pooling_params=params
    )


def test_texts_that_are_compared_are_cut(llm):
    """Also lists of ids."""
    long, tokenizer = "one two three four five six seven eight", llm.get_tokenizer()
    params = PoolingParams(extra_kwargs={"max_tokens_per_query": 2, "max_tokens_per_doc": 3})
    [score] = llm.score(long, long, pooling_params=params, use_tqdm=False)
    two, three = (tokenizer.decode(tokenizer.encode(long)[:n]) for n in (2, 3))
    [wanted] = llm.score(two, three, use_tqdm=False)
    [other] = llm.score([[5, 6, 7]], [[8, 9, 10, 11]], pooling_params=params, use_tqdm=False)
    [same] = llm.score([[5, 6]], [[8, 9, 10]], use_tqdm=False)
    assert score.outputs == wanted.outputs and other.outputs == same.outputs
    told = refusal(InvalidParameter, llm.embed, long, pooling_params=params)
    assert told.startswith("max_tokens_per_query=2") and "score()" in told
    params = PoolingParams(extra_kwargs={"max_tokens_per_doc": 160})
    assert "below max_model_len=160" in refusal(
        InvalidParameter, llm.score, "a", "b", pooling_params=params
    )


def test_a_template_for_texts_that_are_read_apart(llm):
    told = refusal(InvalidParameter, llm.score, "a", "b", chat_template="{{ messages }}")
    assert told.startswith("chat_template") and "reads each text by itself" in told


def test_scores_where_step_pooling_leaves_no_tokens(folder):
    config = {"task": "token_embed", "pooling_type": "STEP", "step_tag_id": 7}
    with LLM(folder, dtype="float32", pooler_config=config) as llm:
        found = llm.score([[7, 8, 7]], [[8, 9], [8, 7], [7]], use_tqdm=False)
        nothing = llm.score([[8]], [[8, 7]], use_tqdm=False)
        query, *documents = (o.outputs.data.numpy() for o in llm.encode(
            [[7, 8, 7], [8, 7], [7]], pooling_task="token_embed", use_tqdm=False))  # fmt: skip
    wanted = [0.0, *(float((query @ one.T).max(axis=1).sum()) for one in documents)]
    assert not any(one.error for one in (*found, *nothing))
    assert [one.outputs.score for one in found] == pytest.approx(wanted, abs=1e-5)
    assert nothing[0].outputs.score == 0.0


def test_largest_similarities(folder):
    with LLM(folder, dtype="float32", pooler_config={"task": "token_embed"}) as llm:
        texts = ["a quick fox", "the dog", "one fox of many"]
        [score, other] = llm.score(texts[0], texts[1:], use_tqdm=False)
        tokens = [o.outputs.data.numpy() for o in llm.encode(
            texts, pooling_task="token_embed", use_tqdm=False)]  # fmt: skip
    for found, document in zip((score, other), tokens[1:], strict=True):
        wanted = (tokens[0] @ document.T).max(axis=1).sum()
        assert found.outputs.score == pytest.approx(float(wanted), abs=1e-5)


def test_a_score_is_computed_where_the_vectors_are(llm):
    """A document's result is one number, whatever else runs; and it is the cosine."""
    query, *documents = texts = [f"{n} quick foxes and a dog" for n in range(20)]
    together = [s.outputs.score for s in llm.score(query, documents, use_tqdm=False)]
    vectors = np.array([e.outputs.embedding for e in llm.embed(texts, use_tqdm=False)])
    assert together == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    asked = QueryVectors((48,), vectors[0].astype(np.float32).tobytes())
    for document, score in zip(documents, together, strict=True):
        params = PoolingParams(compared_with=asked)
        [alone] = llm.encode([document], params, pooling_task="embed", use_tqdm=False)
        assert alone.outputs.data.shape == (1,) and alone.outputs.data.item() == score


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("a vector", "it must be QueryVectors of shape"),
        (QueryVectors((1, 48), bytes(192)), "it must be QueryVectors of shape"),
        (QueryVectors((48,), bytes(191)), "its data have another size"),
        (QueryVectors((-48,), b""), "its data have another size"),
        (QueryVectors((0,), b""), "its data have another size"),
        (QueryVectors((47,), bytes(188)), "vectors of this request have 48 numbers"),
    ],
)
def test_a_query_that_nothing_is_compared_with(llm, query, sentence):
    params = PoolingParams()
    params.compared_with = query
    told = refusal(InvalidParameter, llm.encode, "a", params, pooling_task="embed")
    assert told.startswith("compared_with") and sentence in told
    assert llm.embed("a", use_tqdm=False)


def test_settings_of_a_pooler_as_an_object(folder):
    config = PoolerConfig(task="token_embed", use_activation=False)
    with LLM(folder, dtype="float32", pooler_config=config) as llm:
        [output] = llm.encode([[5, 6]], pooling_task="token_embed", use_tqdm=False)
    assert tuple(output.outputs.data.shape) == (2, 48)
    assert abs(float(output.outputs.data[0].norm()) - 1) > 1e-3


def test_scores_take_one_set_of_parameters(llm):
    told = refusal(InvalidType, llm.score, "a", ["b", "c"], pooling_params=[PoolingParams()] * 2)
    assert told.endswith("it must be one PoolingParams, for all pairs.")


def test_an_engine_that_pools_says_what_to_call_instead(llm):
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.generate("a", PoolingParams()),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.enqueue("a"),
    ):
        with pytest.raises(RequestError, match=r"generates no text. Call embed\(\), encode\(\)"):
            call()


def test_the_registry_knows_what_pools():
    pools = quire.ModelRegistry.is_pooling_model
    for name in ("BertModel", "Qwen2Model", "LlamaForSequenceClassification", "HF_ColBERT"):
        assert pools(name), name
    for name in ("Qwen2ForCausalLM", "FunnelModel", "ColBERTJinaRobertaModel"):
        assert not pools(name), name
