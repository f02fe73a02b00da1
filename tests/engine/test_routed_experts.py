"""Chosen experts in outputs are those of one pass over the whole text, however it was computed."""

import asyncio

import numpy as np
import pytest
import torch

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.engine.outputs.experts import OutputExperts
from quire.errors import InvalidParameter
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.params import RequestOutputKind
from quire.step.columns import RoutedExperts
from quire.testing import make_checkpoint
from tests.models.paged_driver import PagedRun, load

SHAPE = {
    "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [1],
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 6}
SHARED = list(range(5, 45))
PROMPTS = [SHARED + [7, 9], SHARED + [8], [3, 4, 5], SHARED[:33] + [60, 61, 62], [11] * 50]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_checkpoint(
            tmp_path_factory.mktemp(name), SHAPE | more, "qwen3_moe", dtype="float32"
        )
        for name, more in (("full", {}), ("windows", WINDOWS))
    }


def expected(folder, ids):
    """[n - 1, L, k] of one pass over the ids."""
    spec = read_spec(read_config(folder))
    model = load(folder, spec, max_model_len=128, keeps_experts=True)
    seen = []

    def forward(batch):
        seen.append(model.forward(batch))
        return seen[-1]

    PagedRun(model, [torch.tensor(ids)]).step([len(ids)], forward)
    found = np.zeros((len(ids) - 1, 4, 3), dtype=np.int16)
    for layer, chosen in zip((0, 2, 3), seen[0].experts, strict=True):
        found[:, layer] = chosen[:-1].numpy()
    return found


def open_llm(folder, **args):
    return LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=96,
        enable_return_routed_experts=True, **args,
    )  # fmt: skip


def prompts(texts):
    return [{"prompt_token_ids": ids} for ids in texts]


def check(folder, outputs, start=0):
    for output in outputs:
        for completion in output.outputs:
            ids = [*output.prompt_token_ids, *completion.token_ids]
            found = completion.routed_experts
            assert found.dtype == np.int16
            assert np.array_equal(found, expected(folder, ids)[start:])


@pytest.mark.parametrize("name", ["full", "windows"])
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 24, "max_num_seqs": 8},
        {"enforce_eager": True, "async_scheduling": True},
    ],
    ids=["whole", "chunks", "preempted", "eager-overlapped"],
)
def test_experts_are_those_of_one_pass(folders, name, args):
    with open_llm(folders[name], block_size=16, **args) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.9, seed=1, ignore_eos=True)
        check(folders[name], llm.generate(prompts(PROMPTS), params, use_tqdm=False))
        again = llm.generate(prompts(PROMPTS), params, use_tqdm=False)
        check(folders[name], again)
        hits = sum(output.num_cached_tokens for output in again)
        assert (hits > 0) == (name == "full"), "experts are kept with blocks of all tokens only"


def test_completions_of_one_prompt_and_a_start_within_it(folders):
    with open_llm(folders["full"], block_size=16) as llm:
        params = SamplingParams(
            n=3, max_tokens=5, temperature=1.0, seed=3, ignore_eos=True,
            routed_experts_prompt_start=37,
        )  # fmt: skip
        check(folders["full"], llm.generate(prompts(PROMPTS[:2]), params, use_tqdm=False), 37)
        params.routed_experts_prompt_start = 43
        with pytest.raises(InvalidParameter, match="at most 42, the tokens of the prompt"):
            llm.generate(prompts(PROMPTS[:1]), params, use_tqdm=False)


def test_deltas_end_with_the_experts(folders):
    async def run():
        args = AsyncEngineArgs(
            model=str(folders["full"]), skip_tokenizer_init=True, dtype="float32",
            enable_return_routed_experts=True, max_model_len=96,
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(args)
        try:
            params = SamplingParams(
                max_tokens=6, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            return [o async for o in engine.generate(prompts(PROMPTS)[0], params, "a")]
        finally:
            engine.shutdown()

    outputs = asyncio.run(run())
    assert all(o.outputs[0].routed_experts is None for o in outputs[:-1])
    ids = [*PROMPTS[0], *(i for o in outputs for i in o.outputs[0].token_ids)]
    assert np.array_equal(outputs[-1].outputs[0].routed_experts, expected(folders["full"], ids))


def test_they_are_absent_unless_asked_for(folders):
    with LLM(model=str(folders["full"]), skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=2)
        [output] = llm.generate(prompts(PROMPTS[:1]), params, use_tqdm=False)
        assert output.outputs[0].routed_experts is None
        params.routed_experts_prompt_start = 1
        with pytest.raises(InvalidParameter, match="enable_return_routed_experts"):
            llm.generate(prompts(PROMPTS[:1]), params, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="the model has no experts"):
        LLM(enable_return_routed_experts=True)


def test_later_parts_replace_earlier_ones():
    experts = OutputExperts(2)
    assert experts.of(4) is None
    for first, values in ((0, [1, 2, 3]), (3, [4, 5]), (4, [6, 7, 8])):
        experts.add(RoutedExperts(0, first, np.array(values, np.int16).reshape(-1, 1, 1)))
    assert experts.of(8).ravel().tolist() == [3, 4, 6, 7, 8]
    assert experts.of(6).ravel().tolist() == [3, 4, 6]
    assert experts.of(1).ravel().tolist() == []
