"""The same answers over proposers, numbers of drafts, batch sizes and temperatures, and after a
core was killed in the middle.
"""

import asyncio
import os
import signal

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, embedded
from quire.hardware.native import find_native
from quire.params import RequestOutputKind
from tests.runner.drafting.draft_checkpoints import (
    read,
    write,
    write_eagle,
    write_eagle3,
    write_medusa,
)
from tests.speculation.crowd import MARKS, PROMPTS, answers, crowd
from tests.speculation.drafters import Recorder, Replay, Wild, install

NATIVE, REASON = find_native()
pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason=REASON),
    pytest.mark.full,
]
ENGINE = {"max_model_len": 160, "max_num_seqs": 32, "reasoning_config": MARKS, "block_size": 8}
METHODS = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"suffix_decoding_min_token_prob": 0.0},
    "auto": {"prompt_lookup_min": 2},
}


def at(temperature, count):
    """A crowd whose requests are all greedy, or all drawn."""
    prompts, params = crowd(count, max_tokens=60)
    for each in params:
        each.temperature = temperature
        each.n = 1
    return prompts, params


def together(llm, temperature, count):
    prompts, params = at(temperature, 32)
    if count == 1:
        found = [llm.generate(*one, use_tqdm=False) for one in zip(prompts, params, strict=True)]
        return answers([output for outputs in found for output in outputs])
    return answers(llm.generate(prompts, params, use_tqdm=False))


@pytest.fixture(scope="module")
def right():
    with LLM(**ENGINE) as llm:
        return {t: together(llm, t, 32) for t in (0.0, 1.0)}


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(right, method, num_tokens, count):
    assert_accepted(right, METHODS[method] | {"method": method}, num_tokens, count)


def assert_accepted(right, config, num_tokens, count):
    """Answers are right, and some drafts were."""
    config = config | {"num_speculative_tokens": num_tokens}
    config["num_speculative_tokens_per_batch_size"] = [[1, 32, num_tokens]]
    with LLM(**ENGINE, speculative_config=config, disable_log_stats=False) as llm:
        for temperature in (0.0, 1.0):
            assert together(llm, temperature, count) == right[temperature]
        accepted = "vllm:spec_decode_num_accepted_tokens"
        assert [each.value for each in llm.get_metrics() if each.name == accepted][0] > 0


@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_drafter(right, num_tokens, depth):
    config = {"method": "ngram", "num_speculative_tokens": num_tokens}
    with LLM(**ENGINE, speculative_config=config, async_scheduling=depth == 2) as llm:
        for temperature in (0.0, 1.0):
            recorder = Recorder()
            install(llm, recorder, num_tokens)
            assert together(llm, temperature, 32) == right[temperature]
            for make in (Replay, Wild):
                for spoiled in (0.0, 0.3, 1.0):
                    for count in (1, 32):
                        drafter = make(recorder.answers, spoiled=spoiled)
                        install(llm, drafter, num_tokens)
                        assert together(llm, temperature, count) == right[temperature]
                        assert drafter.num_accepted > 0 or spoiled == 1.0


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Draft networks for the embedded model: itself, its own EAGLE-3 network, others by chance, and
    Medusa heads that guess what the model's head does.
    """
    target, folder = embedded.path(), tmp_path_factory.mktemp("networks")
    medusa = write_medusa(folder / "medusa", target, heads=7, blocks=1)
    config, tensors = read(medusa)
    head = read(target)[1]["model.embed_tokens.weight"].float()
    for number in range(7):
        tensors[f"lm_heads.{number}.weight"] = head.clone()
        tensors[f"blocks.{number}.layers.0.weight"].zero_()
    return {
        "draft_model": target,
        "eagle": write_eagle(folder / "eagle", target),
        "eagle3": embedded.draft_head(),
        "eagle3-random": write_eagle3(folder / "eagle3", target, layers=[1, 2, 3], vocab=700),
        "medusa": write(medusa, config, tensors),
    }


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("name", ["draft_model", "eagle", "eagle3", "eagle3-random", "medusa"])
def test_every_network(right, networks, name, num_tokens, count):
    config = {"method": name.removesuffix("-random"), "model": str(networks[name])}
    assert_accepted(right, config, num_tokens, count)


MORTAL = {
    "suffix": {"suffix_decoding_min_token_prob": 0},
    "draft_model": {"model": str(embedded.path())},
    "eagle3": {"model": str(embedded.draft_head())},
}


@pytest.mark.anyio
@pytest.mark.parametrize("method", MORTAL)
async def test_streams_go_on_with_the_same_tokens_after_their_core_has_died(method):
    config = {"method": method, "num_speculative_tokens": 5} | MORTAL[method]
    config["num_speculative_tokens_per_batch_size"] = [[1, 8, 5]]
    args = AsyncEngineArgs(
        max_model_len=160, max_num_seqs=8, speculative_config=config,
        per_request_spec_decode_metrics="detailed",
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    with LLM(max_model_len=160) as llm:
        params = [
            SamplingParams(temperature=t, seed=5, max_tokens=80, ignore_eos=True, detokenize=False)
            for t in (0.0, 1.0, 0.7)
        ]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    is_dead = False

    async def ids(number):
        nonlocal is_dead
        found = []
        params[number].output_kind = RequestOutputKind.DELTA
        async for output in engine.generate(PROMPTS[number], params[number], str(number)):
            found += output.outputs[0].token_ids
            if number == 0 and len(found) >= 10 and not is_dead:
                is_dead = True
                os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)
        accepted = output.outputs[0].spec_decode_metrics.per_step_accepted
        assert accepted
        if method != "suffix":  # which may have no drafts: the others go without only at first
            assert 80 - 5 <= sum(accepted) + len(accepted) < 80, "counted before the death, too"
        return found

    try:
        found = await asyncio.wait_for(asyncio.gather(*map(ids, range(3))), 120)
        assert is_dead and found == expected
    finally:
        engine.shutdown()
