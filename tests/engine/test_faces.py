"""Every face of an engine, over a core in this process and in one of its own: the same texts."""

import asyncio

import pytest

from quire import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.inproc import build_client
from quire.engine.frontend.frontend import build_front_end
from quire.errors import InvalidType
from quire.params import RequestOutputKind
from quire.testing.loop_client import LoopClient

pytestmark = pytest.mark.slow

PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = ["]
WISHES = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 200}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16),
    SamplingParams(temperature=0.9, max_tokens=16, n=2, logprobs=2, presence_penalty=0.4),
    SamplingParams(temperature=0.8, seed=11, max_tokens=24, stop=["\n\n"], prompt_logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=8, logit_bias={40: 3.0}, min_tokens=4),
]


def shown(output):
    return (
        output.prompt_token_ids,
        output.prompt_logprobs,
        [
            (c.text, list(c.token_ids), c.logprobs, c.finish_reason, c.stop_reason)
            for c in output.outputs
        ],
    )


def final(params):
    own = params.clone()
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own


def by_llm(in_process):
    with LLM(enable_multiprocessing=not in_process, **WISHES) as llm:
        return list(map(shown, llm.generate(PROMPTS, PARAMS, use_tqdm=False)))


def by_llm_engine(in_process):
    engine = LLMEngine.from_engine_args(EngineArgs(**WISHES), enable_multiprocessing=not in_process)
    found = {}
    try:
        for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(place), prompt, final(params))
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
    finally:
        engine.close()
    return [shown(found[str(place)]) for place in range(len(PROMPTS))]


def by_async_llm(in_process):
    async def last(engine, place):
        stream = engine.generate(PROMPTS[place], final(PARAMS[place]), str(place))
        [output] = [output async for output in stream]
        return shown(output)

    async def main():
        args = AsyncEngineArgs(**WISHES)
        if in_process:
            plan = args.create_engine_config()
            inner = build_client(plan)
            client = LoopClient(inner, lambda: inner.engine_core.has_work)
            engine = AsyncLLM(plan, front_end=build_front_end(plan, client))
        else:
            engine = AsyncLLM.from_engine_args(args)
        try:
            return await asyncio.gather(*(last(engine, place) for place in range(len(PROMPTS))))
        finally:
            engine.shutdown()

    return asyncio.run(main())


FACES = [by_llm, by_llm_engine, by_async_llm]


@pytest.fixture(scope="module")
def expected():
    found = by_llm(in_process=True)
    assert all(completion[0] for _, _, completions in found for completion in completions)
    return found


@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "in processes"])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_the_same_texts_whatever_the_face_and_wherever_the_core(expected, face, in_process):
    assert face(in_process) == expected


def test_an_engine_needs_a_plan_to_be_made_from():
    with pytest.raises(InvalidType, match="EnginePlan"):
        AsyncLLM(None)
