"""Beam search against a search of every text there is."""

import itertools
import math
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.beam_search import BeamSearch
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, RequestError
from quire.llm import LLM
from quire.outputs import Logprob
from quire.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.engine.frontend.scripted_engines import embedded_tokenizer, make_engine

EOS = 0
PROMPT = [9, 9]


def make_model(seed, vocab_size=3):
    """Logprobs of every next token, a function of the text so far."""

    def logprobs(tokens):
        rng = random.Random(f"{seed}{tokens}")
        weights = [rng.random() + 0.05 for _ in range(vocab_size)]
        return {i: math.log(weight / sum(weights)) for i, weight in enumerate(weights)}

    return logprobs


def search(model, params):
    found = BeamSearch("p", PROMPT, params, EOS, params.max_tokens)
    while not found.is_over:
        found.advance(
            [{i: Logprob(value) for i, value in model(beam.tokens).items()} for beam in found.beams]
        )
    return found.best()


def every_text(model, max_tokens, ends):
    """(tokens, summed logprob) of all texts that end with EOS or have the full length."""
    texts = []
    for length in range(1, max_tokens + 1):
        for tail in itertools.product(range(3), repeat=length):
            is_done = ends and tail[-1] == EOS
            if (ends and EOS in tail[:-1]) or not (is_done or length == max_tokens):
                continue
            total = sum(model([*PROMPT, *tail[:i]])[tail[i]] for i in range(length))
            texts.append(([*PROMPT, *tail], total))
    return texts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_wide_search_finds_the_best_of_all_texts(seed, penalty, ignore_eos):
    model = make_model(seed)
    params = BeamSearchParams(27, 3, length_penalty=penalty, ignore_eos=ignore_eos)

    def score(entry):
        tokens, total = entry
        length = len(tokens) - (not ignore_eos and tokens[-1] == EOS)
        return total / length**penalty

    expected = sorted(every_text(model, 3, not ignore_eos), key=score, reverse=True)[:27]
    best = search(model, params)
    assert [beam.tokens for beam in best] == [tokens for tokens, _ in expected]
    assert [beam.cum_logprob for beam in best] == pytest.approx([total for _, total in expected])
    assert all(len(beam.logprobs) == len(beam.tokens) - len(PROMPT) for beam in best)


@pytest.mark.parametrize("penalty", [-1.5, 1.0, 2.0])
def test_lengths_of_outputs_rank_as_transformers_does(penalty):
    """A small random model, and a search so wide that it keeps every text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=EOS, pad_token_id=5, initializer_range=0.8,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = [3, 1, 4]
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), num_beams=160, max_new_tokens=3,
        length_penalty=penalty, early_stopping="never", num_return_sequences=12, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip

    def texts(rule):
        params = BeamSearchParams(160, 3, length_penalty=penalty, length_rule=rule)
        found = BeamSearch("p", prompt, params, EOS, params.max_tokens)
        while not found.is_over:
            with torch.no_grad():
                logits = model(torch.tensor([beam.tokens for beam in found.beams])).logits[:, -1]
            rows = logits.log_softmax(-1).tolist()
            found.advance([{i: Logprob(value) for i, value in enumerate(row)} for row in rows])
        best = found.best()[:12]
        return [beam.tokens for beam in best], [found.score(beam) for beam in best]

    expected = [_without_padding(tokens) for tokens in theirs.sequences.tolist()]
    tokens, scores = texts("output")
    assert tokens == expected
    assert scores == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-4)
    assert texts("sequence")[0] != expected


def _without_padding(tokens):
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def test_width_one_is_greedy():
    model = make_model(3)
    params = BeamSearchParams(1, 4, ignore_eos=True)
    tokens = list(PROMPT)
    for _ in range(4):
        values = model(tokens)
        tokens.append(max(values, key=values.get))
    assert [beam.tokens for beam in search(model, params)] == [tokens]


def test_on_an_engine():
    llm = LLM.from_engine(make_engine(lambda request: [request.prompt_token_ids[-1] + 1]))
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    outputs = llm.beam_search([[10], {"prompt_token_ids": [50]}, "text"], params, use_tqdm=False)
    assert [len(output.sequences) for output in outputs] == [3, 3, 3]
    for first, output in zip([10, 50], outputs, strict=False):
        for beam in output.sequences:
            assert beam.tokens[0] == first
            assert len(beam.tokens) == 5
            assert beam.text == embedded_tokenizer().decode(beam.tokens, skip_special_tokens=True)
            assert beam.finish_reason is None
        scores = [beam.cum_logprob for beam in output.sequences]
        assert scores == sorted(scores, reverse=True)
    sent = llm.llm_engine.front_end.client.seen[0].sampling_params
    assert (sent.logprobs, sent.max_tokens, sent.temperature) == (6, 1, 0.0)
    assert sent.detokenize is False
    alone = llm.beam_search([[10]], params, concurrency_limit=1)
    assert [beam.tokens for beam in alone[0].sequences] == [
        beam.tokens for beam in outputs[0].sequences
    ]


def test_the_model_bounds_the_length():
    llm = LLM.from_engine(make_engine(lambda request: [5], max_model_len=6))
    (output,) = llm.beam_search([[1, 2, 3, 4]], BeamSearchParams(2, 50))
    assert {len(beam.tokens) for beam in output.sequences} == {6}


def test_what_a_form_forbids_grows_no_text_and_its_end_ends_one():
    form = StructuredOutputsParams(regex="ab")
    found = BeamSearch(
        "p", PROMPT, BeamSearchParams(2, 9, structured_outputs=form), EOS, 9, form_ends=[7]
    )
    [one], step = found.step()
    assert (one.prompt, one.output_token_ids, step.max_tokens) == (PROMPT, [], 1)
    assert step.structured_outputs == form
    found.advance([{1: Logprob(-1.0), 2: Logprob(-math.inf), 3: Logprob(-2.0)}])
    begun, step = found.step()
    assert [(each.prompt, each.output_token_ids) for each in begun] == [
        (PROMPT, [1]),
        (PROMPT, [3]),
    ]
    assert step.max_tokens == 2
    found.advance([{7: Logprob(0.0), 2: Logprob(-math.inf)}, {EOS: Logprob(0.0)}])
    assert found.is_over
    assert [beam.tokens for beam in found.best()] == [[*PROMPT, 1, 7], [*PROMPT, 3, EOS]]


@pytest.fixture(scope="module")
def embedded_llm():
    with LLM(max_num_seqs=16, dtype="float32") as engine:
        yield engine


def test_a_form_holds_for_every_text(embedded_llm):
    """Within the form every text is searched; the scores are of what the form leaves."""
    form = StructuredOutputsParams(regex="(yes|no|nobody)[!?]")
    params = BeamSearchParams(10, 12, structured_outputs=form)
    prompt = "Is this a question? "
    [output] = embedded_llm.beam_search([prompt], params)
    num = len(embedded_llm.get_tokenizer().encode(prompt))
    decode = embedded_llm.get_tokenizer().decode
    ended = [beam for beam in output.sequences if beam.tokens[-1] in ends_of(embedded_llm)]
    texts = {decode(beam.tokens[num:], skip_special_tokens=True) for beam in ended}
    assert texts <= {word + mark for word in ("yes", "no", "nobody") for mark in "!?"}
    assert len(texts) > 3, "beams may be the same text of other tokens"
    assert all(math.isfinite(beam.cum_logprob) for beam in output.sequences)
    best = ended[0]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=form, logprobs=0)
    [one] = embedded_llm.generate(prompt, greedy, use_tqdm=False)
    assert best.cum_logprob >= one.outputs[0].cumulative_logprob - 1e-3


def ends_of(llm):
    inputs = llm.llm_engine.front_end.inputs
    return {*inputs.limits.eos_token_ids, llm.get_tokenizer().eos_token_id}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_schema_is_kept_by_each_text_that_ends(embedded_llm, ignore_eos):
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
    }  # fmt: skip
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = BeamSearchParams(2, 16, structured_outputs=form, ignore_eos=ignore_eos)
    outputs = embedded_llm.beam_search(["A: ", [5, 6, 7]], params)
    for output in outputs:
        texts = [beam.text[beam.text.index('{"') :] for beam in output.sequences]
        assert sorted(texts) == ['{"ok":false}', '{"ok":true}']


@pytest.mark.parametrize(
    ("params", "options", "error", "text"),
    [
        (
            BeamSearchParams(11, 1),
            {},
            InvalidParameter,
            "beam_width=11 is not allowed: a step asks for 2 * beam_width logprobs, and "
            "max_logprobs is 20. Raise the engine's max_logprobs.",
        ),
        (SamplingParams(), {}, InvalidType, "it must be a BeamSearchParams."),
        (
            BeamSearchParams(1, 1),
            {"concurrency_limit": 0},
            InvalidParameter,
            "concurrency_limit=0 is not allowed: it must be None or an int of at least 1.",
        ),
        (
            BeamSearchParams(1, 1),
            {"lora_request": "x"},
            RequestError,
            "LoRA is not enabled: start the engine with enable_lora (--enable-lora).",
        ),
        (
            BeamSearchParams(1, 1, structured_outputs=StructuredOutputsParams(regex="(a")),
            {},
            InvalidParameter,
            "the engine has no tokenizer. Give an engine with a tokenizer.",
        ),
        (
            BeamSearchParams(1, 1, watermarking="x"),
            {},
            NotBuiltYet,
            "watermarking='x' is not allowed: this release does not implement it. Leave it out.",
        ),
    ],
    ids=["width", "type", "limit", "lora", "grammar", "watermark"],
)
def test_refusals(params, options, error, text):
    llm = LLM.from_engine(make_engine())
    with pytest.raises(error) as caught:
        llm.beam_search(["a"], params, **options)
    assert str(caught.value).endswith(text)
    assert not llm.llm_engine.front_end.client.seen
