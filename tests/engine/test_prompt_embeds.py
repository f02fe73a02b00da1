"""Prompts as embeddings give the answers of transformers' `inputs_embeds`, and those of the model's
own table the answers of the ids, whatever stands next to them in a step.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, EngineArgs, SamplingParams
from quire.errors import InvalidParameter, InvalidType, RequestError
from quire.testing import make_checkpoint

ACCURACY = 1e-4  # of log-probabilities
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
SHAPE = {"num_hidden_layers": 2, "vocab_size": 300}
GPT2_SHAPE = {"n_layer": 2, "vocab_size": 300}
OPTIONS = {
    "max_model_len": 192, "dtype": "float32", "max_num_seqs": 4, "block_size": 4,
    "max_num_batched_tokens": 48, "enable_prompt_embeds": True,
}  # fmt: skip


def folder_of(root, family):
    shape = GPT2_SHAPE if family == "gpt2" else SHAPE
    return make_checkpoint(root, shape, family, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(model=str(folder), enforce_eager=True, **OPTIONS) as made:
        yield made


def core_of(llm):
    return llm.llm_engine.front_end.client.engine_core


def drawn(seed, num_tokens, width):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, width, generator=generator) * 0.7


def greedy(model, rows, num_tokens=6):
    """Transformers' next ids after given embeddings, and their log-probabilities."""
    table, ids, logprobs = model.get_input_embeddings(), [], []
    with torch.no_grad():
        for _ in range(num_tokens):
            more = table(torch.tensor(ids, dtype=torch.int64))
            scores = model(inputs_embeds=torch.cat([rows, more])[None]).logits[0, -1]
            best = scores.log_softmax(-1).max(-1)
            ids.append(int(best.indices))
            logprobs.append(float(best.values))
    return ids, logprobs


def answer(output):
    [completion] = output.outputs
    chosen = zip(completion.logprobs, completion.token_ids, strict=True)
    return completion.token_ids, [entry[token].logprob for entry, token in chosen]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def same(found, right):
    assert found[0] == right[0]
    assert found[1] == pytest.approx(right[1], abs=ACCURACY)


FAMILIES = [
    "granite",  # its factor is that of given embeddings, too
    *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma2", "gpt2", "mamba2")),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(tmp_path, family):
    folder = folder_of(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = drawn(1, 9, model.config.hidden_size)
    ids = [11, 12, 13, 14]
    with LLM(model=str(folder), **OPTIONS) as llm, torch.no_grad():
        own = model.get_input_embeddings()(torch.tensor(ids)).detach()
        given = [{"prompt_embeds": rows}, {"prompt_embeds": own}, ids]
        found, table, plain = llm.generate(given, PARAMS, use_tqdm=False)
    same(answer(found), greedy(model, rows))
    assert answer(table) == answer(plain), "the same numbers, the same bits"


def test_long_prompts_cut_and_found_again(llm, oracle):
    """Three items of two prompts that differ after 140 tokens; chunks of 48."""
    width, counters = oracle.config.hidden_size, core_of(llm).scheduler.counters
    rows = drawn(2, 150, width)
    other = torch.cat([rows[:140], drawn(3, 9, width)])
    first = llm.generate({"prompt_embeds": rows}, PARAMS, use_tqdm=False)[0]
    same(answer(first), greedy(oracle, rows))
    assert first.prompt_token_ids == [0] * 150 and first.num_cached_tokens == 0
    hits = counters.prefix_hits
    again, second, both = (
        llm.generate({"prompt_embeds": each, **more}, PARAMS, use_tqdm=False)[0]
        for each, more in ((rows, {}), (other, {}), (rows, {"cache_salt": "another"}))
    )
    assert [answer(again), answer(both)] == [answer(first)] * 2
    same(answer(second), greedy(oracle, other))
    assert again.num_cached_tokens == 148 and second.num_cached_tokens == 128
    assert both.num_cached_tokens == 0 and counters.prefix_hits > hits


def test_alone_and_in_a_crowd(llm, oracle):
    width = oracle.config.hidden_size
    crowd = [{"prompt_embeds": drawn(seed, 5 + 7 * seed, width)} for seed in range(6)]
    crowd += [[11, 12, 13], "abc", {"prompt_embeds": drawn(1, 12, width), "cache_salt": "x"}]
    alone = [llm.generate(each, PARAMS, use_tqdm=False)[0] for each in crowd]
    llm.reset_prefix_cache()
    together = llm.generate(crowd, PARAMS, use_tqdm=False)
    assert [answer(each) for each in together] == [answer(each) for each in alone]
    same(answer(alone[3]), greedy(oracle, crowd[3]["prompt_embeds"]))


def test_preempted(llm, folder):
    rows = [drawn(seed, 40, llm.llm_engine.front_end.inputs.embeds.width) for seed in range(4)]
    prompts = [{"prompt_embeds": each} for each in rows]
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    right = tokens(llm.generate(prompts, long, use_tqdm=False))
    with LLM(model=str(folder), **OPTIONS, num_gpu_blocks_override=49) as small:
        assert tokens(small.generate(prompts, long, use_tqdm=False)) == right
        assert core_of(small).scheduler.counters.num_preemptions > 0


def test_ids_among_embeddings(llm, oracle):
    rows = drawn(5, 6, oracle.config.hidden_size)
    ids, is_id = [11, 7, 7, 14, 7, 16], [True, False, False, True, False, True]
    table = oracle.get_input_embeddings()(torch.tensor(ids)).detach()
    whole = torch.where(torch.tensor(is_id)[:, None], table, rows)
    given = {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": is_id}
    [mixed] = llm.generate(given, PARAMS, use_tqdm=False)
    same(answer(mixed), greedy(oracle, whole))
    assert mixed.prompt_token_ids == [11, 0, 0, 14, 0, 16]


@pytest.mark.parametrize("form", ["bfloat16", "float16", "numpy", "batch", "view", "big"])
def test_forms_of_embeddings(llm, oracle, form):
    rows = drawn(6, 5, oracle.config.hidden_size)
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(form, torch.float32)
    rows = rows.to(half)
    made = {
        "numpy": rows.float().numpy(),
        "batch": rows[None],
        "view": torch.stack([rows.T, rows.T])[1].T,
        "big": rows.float().numpy().astype(">f4"),
    }.get(form, rows)
    found = llm.generate({"prompt_embeds": made}, PARAMS, use_tqdm=False)[0]
    same(answer(found), greedy(oracle, rows.float()))


def test_the_callers_own_tensor_may_change(llm, oracle):
    rows = drawn(7, 5, oracle.config.hidden_size)
    right = greedy(oracle, rows)
    llm.enqueue({"prompt_embeds": rows}, PARAMS)
    rows.zero_()
    [found] = llm.wait_for_completion(use_tqdm=False)
    same(answer(found), right)


def test_several_completions_and_a_seed(llm, oracle):
    rows = drawn(8, 5, oracle.config.hidden_size)
    params = SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True)
    first, again = (
        llm.generate({"prompt_embeds": rows}, params, use_tqdm=False)[0] for _ in range(2)
    )
    texts = [each.token_ids for each in first.outputs]
    assert texts == [each.token_ids for each in again.outputs] and len(set(map(tuple, texts))) > 1


REFUSED = {
    "width": (lambda w: torch.zeros(3, w + 1), InvalidParameter, "shape must be [tokens, "),
    "axes": (lambda w: torch.zeros(w), InvalidParameter, "shape must be [tokens, "),
    "empty": (lambda w: torch.zeros(0, w), InvalidParameter, "shape must be [tokens, "),
    "whole numbers": (
        lambda w: torch.zeros(3, w, dtype=torch.int64),
        InvalidParameter,
        "prompt_embeds='int64' is not allowed: it must be a dense tensor",
    ),
    "double": (lambda w: np.zeros((3, w)), InvalidParameter, "float16, bfloat16 or float32"),
    "NaN": (lambda w: torch.full((3, w), float("nan")), InvalidParameter, "not finite"),
    "infinite": (lambda w: torch.full((3, w), float("inf")), InvalidParameter, "not finite"),
    "list": (lambda w: [[0.0] * w], InvalidType, "it must be a dense tensor"),
    "sparse": (lambda w: torch.zeros(3, w).to_sparse(), InvalidParameter, "Call to_dense()"),
    "too long": (lambda w: torch.zeros(192, w), RequestError, "192"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(llm, oracle, name):
    make, kind, text = REFUSED[name]
    with pytest.raises(kind) as caught:
        llm.generate({"prompt_embeds": make(oracle.config.hidden_size)}, PARAMS, use_tqdm=False)
    assert text in str(caught.value)


TOGETHER = {
    "prompt_logprobs": ({}, {"prompt_logprobs": 1}),
    "truncate_prompt_tokens": ({}, {"truncate_prompt_tokens": 2}),
    "prompt_is_token_ids": ({"prompt_token_ids": [1, 2], "prompt_is_token_ids": [True, 1]}, {}),
    "prompt_token_ids": ({"prompt_token_ids": [1, 2, 3]}, {}),
    "multi_modal_data": ({"multi_modal_data": {"image": 1}}, {}),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_does_not_go_with_embeddings(llm, oracle, name):
    more, params = TOGETHER[name]
    prompt = {"prompt_embeds": drawn(1, 3, oracle.config.hidden_size), **more}
    with pytest.raises(InvalidParameter, match=name):
        llm.generate(prompt, SamplingParams(max_tokens=2, **params), use_tqdm=False)


def test_without_the_option_embeddings_are_refused(folder):
    says = "You must set `--enable-prompt-embeds`"
    with LLM(model=str(folder), max_model_len=64) as llm, pytest.raises(RequestError, match=says):
        llm.generate({"prompt_embeds": torch.zeros(3, 64)}, PARAMS, use_tqdm=False)


def test_models_whose_layers_read_ids_refuse_the_option(tmp_path):
    args = EngineArgs(
        model=str(folder_of(tmp_path, "qwen3")), enable_prompt_embeds=True,
        model_impl="transformers",
    )  # fmt: skip
    with pytest.raises(InvalidParameter, match="enable_prompt_embeds"):
        args.create_engine_config()


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "prompt_embeds"}]},
    {"role": "user", "content": "def"},
]


def test_chats_keep_embeddings_in_their_place(llm, oracle):
    """A text's embeddings in place of the text give the ids' answer, for tokens that are cut there
    anyway.
    """
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(" xyz", add_special_tokens=False)
    part = {"type": "prompt_embeds", "data": drawn(1, 4, oracle.config.hidden_size)}
    own = oracle.get_input_embeddings()(torch.tensor(ids)).detach()
    chats = [
        [CHAT[0], {"role": "user", "content": [CHAT[1]["content"][0], more]}, CHAT[2]]
        for more in (part, {**part, "data": own}, {"type": "text", "text": " xyz"})
    ]
    found, table, plain = llm.chat(chats, PARAMS, use_tqdm=False)
    assert table.prompt_token_ids.count(0) == len(ids)
    start = table.prompt_token_ids.index(0)
    given = table.prompt_token_ids[:start] + ids + table.prompt_token_ids[start + len(ids) :]
    [right] = llm.generate(given, PARAMS, use_tqdm=False)
    assert answer(table) == answer(right)
    assert tokenizer.decode(given) == tokenizer.decode(plain.prompt_token_ids)
    whole = oracle.get_input_embeddings()(torch.tensor(found.prompt_token_ids)).detach()
    start = found.prompt_token_ids.index(0)
    whole[start : start + 4] = part["data"]
    same(answer(found), greedy(oracle, whole))


def test_templates_that_lose_embeddings_are_refused(llm, oracle):
    part = {"type": "prompt_embeds", "data": drawn(1, 4, oracle.config.hidden_size)}
    chat = [{"role": "user", "content": [part]}]
    for template in ("{{ 'a' }}", "{% for i in (1, 2) %}{{ messages[0].content }}{% endfor %}"):
        with pytest.raises(RequestError, match="chat template (leaves out|repeats) embeddings"):
            llm.chat(chat, PARAMS, chat_template=template, use_tqdm=False)


def test_pooling(tmp_path):
    folder = folder_of(tmp_path, "qwen3")
    with LLM(model=str(folder), runner="pooling", **OPTIONS) as llm:
        table = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = table.get_input_embeddings()(torch.tensor([5, 6, 7])).detach()
        by_ids, by_rows = llm.embed([[5, 6, 7], {"prompt_embeds": rows}], use_tqdm=False)
        assert by_rows.outputs.embedding == by_ids.outputs.embedding
