"""More and fewer cores while requests run: nothing is lost."""

import asyncio

import psutil
import pytest

from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.engine.client.scaling import scale
from quire.errors import EngineError, InvalidParameter, LoadError
from quire.params import RequestOutputKind
from tests.engine.frontend.async_engines import looped

SMALL = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "max_model_len": 256,
}
PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = ["]
PARAMS = SamplingParams(
    temperature=0.8, seed=5, max_tokens=120, ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)  # fmt: skip


class Cores:
    """Cores that take `turns` looks to start and to finish, or fail."""

    def __init__(self, count, *, turns=2, error=None):
        self.present = dict.fromkeys(range(count), turns)
        self.new = {}
        self.leaving = set()
        self.is_scaling = False
        self.turns, self.error = turns, error
        self.retired = []

    @property
    def engine_indices(self):
        return list(self.present)

    def require_scalable(self):
        pass

    def start_new(self, indices):
        self.new |= dict.fromkeys(indices, self.turns)

    def is_ready(self, index):
        self.new[index] -= 1
        if self.error is not None and self.new[index] == 0:
            raise self.error
        return self.new[index] <= 0

    def admit(self, indices):
        self.present |= {index: self.new.pop(index) for index in indices}

    def num_requests(self, index):
        assert index in self.leaving
        self.present[index] = max(0, self.present[index] - 1)
        return self.present[index]

    def retire(self, index):
        self.new.pop(index, None)
        self.present.pop(index, None)
        self.retired.append(index)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2), (1, 2)])
def test_the_highest_go_and_the_lowest_free_come(before, after):
    cores = Cores(before)
    asyncio.run(scale(cores, after, 60.0))
    assert sorted(cores.engine_indices) == list(range(after))
    assert cores.retired == list(range(after, before))
    assert (cores.new, cores.leaving) == ({}, set())


def test_a_core_that_cannot_start_leaves_all_as_it_was():
    cores = Cores(1, error=LoadError("no memory"))
    with pytest.raises(LoadError, match="no memory"):
        asyncio.run(scale(cores, 3, 60.0))
    assert cores.engine_indices == [0]
    assert cores.new == {}


def test_a_core_that_does_not_finish_in_time_stays():
    cores = Cores(2, turns=10**9)
    with pytest.raises(TimeoutError, match="all cores stay"):
        asyncio.run(scale(cores, 1, 0.0))
    assert (cores.engine_indices, cores.leaving, cores.retired) == ([0, 1], set(), [])


@looped
async def test_one_change_at_a_time():
    cores = Cores(1)
    first = asyncio.ensure_future(scale(cores, 2, 60.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="is changing"):
        await scale(cores, 3, 60.0)
    await first
    assert (cores.engine_indices, cores.is_scaling) == ([0, 1], False)


def test_no_cores_are_refused():
    with pytest.raises(InvalidParameter, match="at least 1"):
        asyncio.run(scale(Cores(2), 0, 1.0))


@pytest.mark.full
@pytest.mark.slow
def test_streams_go_on_while_cores_come_and_go():
    with LLM(**SMALL) as llm:
        expected = [o.outputs[0].text for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    before = len(psutil.Process().children())

    async def last(engine, prompt, name, rank):
        stream = engine.generate(prompt, PARAMS, name, data_parallel_rank=rank)
        return [output async for output in stream][-1].outputs[0].text

    async def main():
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))

        def begin(rank):
            names = [f"{rank}-{place}" for place in range(len(PROMPTS))]
            pairs = zip(PROMPTS, names, strict=True)
            return [asyncio.create_task(last(engine, p, name, rank)) for p, name in pairs]

        try:
            first = begin(0)
            await engine.scale_elastic_ep(2)
            assert len(psutil.Process().children()) == before + 2
            config = engine.vllm_config.parallel_config
            assert config.data_parallel_size == config.data_parallel_size_local == 2
            second = begin(1)
            await asyncio.sleep(0)
            await engine.scale_elastic_ep(1, drain_timeout=60)
            with pytest.raises(InvalidParameter, match="data_parallel_rank"):
                await begin(1)[0]
            await engine.scale_elastic_ep(1)
            assert engine.vllm_config.parallel_config.data_parallel_size == 1
            third = begin(None)
            found = [await asyncio.gather(*tasks) for tasks in (first, second, third)]
            assert len(psutil.Process().children()) == before + 1
            await engine.pause_generation()
            with pytest.raises(EngineError, match="paused"):
                await engine.scale_elastic_ep(2)
            return found
        finally:
            engine.shutdown()

    assert asyncio.run(main()) == [expected] * 3
    assert len(psutil.Process().children()) == before
