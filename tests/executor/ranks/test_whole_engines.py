"""Whole engines on two stages of two workers, in processes: everything at once has the bits of one
worker, and so has what comes after calls of the operator.
"""

from __future__ import annotations

import shutil

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import LoadError
from quire.testing import make_checkpoint
from tests.executor.ranks.test_multiproc import DRAFTS, EXTENSION, FOUR, SHAPE
from tests.support.needs import needs_ranks

pytestmark = [*needs_ranks, pytest.mark.full]

FORMS = (
    *({"choice": ["yes", "no"]}, {"regex": "[a-f]{3,9}!"}, {"json": {"type": "object"}}),
    *(None, None),
)
FEW = {
    "max_num_seqs": 12, "block_size": 16, "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 16, "max_model_len": 128, "device": "cpu",
}  # fmt: skip
"""Blocks for a third of the completions."""
OWN = {
    "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "max_model_len": 64,
    "block_size": 4, "num_gpu_blocks_override": 60,
}  # fmt: skip


def answers(llm, prompts, params):
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        (each.token_ids, [{t: p.logprob for t, p in at.items()} for at in each.logprobs])
        for output in found
        for each in output.outputs
    ]


def in_forms(**wishes):
    """Three completions of each prompt, and how often one lost its row."""
    params = [
        SamplingParams(
            n=3,
            temperature=0.8,
            seed=place,
            max_tokens=16,
            logprobs=2,
            structured_outputs=None if form is None else StructuredOutputsParams(**form),
        )
        for place, form in enumerate(FORMS)
    ]
    prompts = [[60 + place, 61, 62, 63 + place] * 6 for place in range(len(FORMS))]
    with LLM(**FEW, **wishes) as llm:
        found = answers(llm, prompts, params)
        return found, llm.llm_engine.engine_core.engine_core.scheduler.counters.num_preemptions


@pytest.fixture(scope="module")
def right():
    return in_forms()[0]


@pytest.mark.parametrize(
    "wishes",
    [FOUR, FOUR | {"speculative_config": DRAFTS},
     {"tensor_parallel_size": 2, "async_scheduling": True}],
    ids=["2 x 2", "2 x 2 with drafts", "ahead"],
)  # fmt: skip
def test_completions_in_forms_that_are_preempted_have_the_bits_of_one(right, wishes):
    found, num_preemptions = in_forms(**wishes)
    assert found == right and num_preemptions


@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "in a process of its own"])
def test_calls_of_the_operator_leave_ranks_as_they_were(tmp_path, is_apart):
    folder = make_checkpoint(tmp_path / "tiny", SHAPE, "llama", dtype="float32")
    greedy = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2, ignore_eos=True)
    prompts = [[5 + place, 9, 17, 40 + place] for place in range(5)]
    with LLM(str(folder), **OWN) as llm:
        right = answers(llm, prompts, greedy)
    profiles = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "profiles")}
    wishes = OWN | FOUR | {"enable_multiprocessing": is_apart}
    with LLM(
        str(folder), worker_extension_cls=EXTENSION, profiler_config=profiles, **wishes
    ) as llm:
        with pytest.raises(TimeoutError, match="not answered within"):
            llm.collective_rpc("nap", timeout=0.2, args=(1.0, 2))
        assert llm.collective_rpc("nap", timeout=30, args=(0.0, 0)) == [0, 1, 2, 3]
        assert llm.collective_rpc("check_health") == [None] * 4
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm, prompts, greedy) == right
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        llm.start_profile()
        assert answers(llm, prompts, greedy) == right
        llm.stop_profile()
        assert len([file for file in (tmp_path / "profiles").rglob("*") if file.is_file()]) == 4
        llm.save_sharded_state(str(tmp_path / "saved"))
    for file in ("config.json", "generation_config.json"):
        if (folder / file).exists():
            shutil.copy(folder / file, tmp_path / "saved")
    with LLM(str(tmp_path / "saved"), load_format="sharded_state", **wishes) as llm:
        assert answers(llm, prompts, greedy) == right
    with pytest.raises(LoadError, match="pipeline_parallel_size=2"):
        LLM(str(tmp_path / "saved"), load_format="sharded_state", **OWN, tensor_parallel_size=4)
