"""More adapters than slots on the embedded model: many streams at once while adapters are loaded,
unloaded and overwritten, and while the core is killed. Every stream has the tokens that its adapter
gives alone, in another engine.
"""

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.errors import RequestError
from quire.params import RequestOutputKind

TRAINED = Path(__file__).parent / "adapters" / "shout"
WEIGHTS = "adapter_model.safetensors"
PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n", "for i in range("]
WISHES = {
    "dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_bytes": 2**25, "enable_lora": True,
}  # fmt: skip


def make_adapters(folder, count):
    """Adapters that differ: the trained one with noise, at another strength each."""
    trained, made = load_file(TRAINED / WEIGHTS), []
    for index in range(count):
        chance = torch.Generator().manual_seed(index)
        path = folder / f"adapter {index}"
        shutil.copytree(TRAINED, path)
        noisy = {
            name: tensor * (1 + 0.5 * torch.randn(tensor.shape, generator=chance))
            for name, tensor in trained.items()
        }
        save_file(noisy, path / WEIGHTS)
        made.append(LoRARequest(f"adapter {index}", index + 1, path))
    return made


def params_of(index):
    return SamplingParams(
        temperature=0.7 * (index % 2), seed=index, max_tokens=6 + 5 * (index % 4), ignore_eos=True
    )


def alone(adapters, asked):
    """The tokens of each (adapter, prompt, params), one adapter after the other in one slot."""
    found = {}
    with LLM(**WISHES, max_loras=1, enable_prefix_caching=False) as llm:
        for adapter in adapters:
            mine = [one for one in asked if one[0] is adapter]
            outputs = llm.generate(
                [prompt for _, prompt, _ in mine], [params_of(p) for *_, p in mine],
                lora_request=adapter, use_tqdm=False,
            )  # fmt: skip
            for (_, prompt, params), output in zip(mine, outputs, strict=True):
                found[adapter, prompt, params] = output.outputs[0].token_ids
    return found


async def one_stream(engine, name, adapter, prompt, params, pause_s):
    await asyncio.sleep(pause_s)
    own = params_of(params)
    own.output_kind = RequestOutputKind.DELTA
    ids = []
    async for output in engine.generate(prompt, own, name, lora_request=adapter):
        [completion] = output.outputs
        assert completion.finish_reason in (None, "length"), completion.error
        ids += completion.token_ids
    return ids


async def disturb(engine, adapters, pick, num_kills):
    """Until it is cancelled: load, unload and pin adapters, and kill the core."""
    while True:
        await asyncio.sleep(0.05)
        adapter = pick.choice(adapters)
        if pick.random() < 0.5:
            assert await engine.add_lora(adapter)
        else:
            await engine.remove_lora(adapter.lora_int_id)
        with pytest.raises(RequestError, match="There is no LoRA adapter"):
            await engine.add_lora(LoRARequest("none", 9999, "/no/such/folder"))
        if num_kills and pick.random() < 0.2:
            num_kills -= 1
            os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)


async def crowd(engine, adapters, asked, num_kills):
    pick = random.Random(len(adapters))
    disturbing = asyncio.create_task(disturb(engine, adapters, pick, num_kills))
    streams = [
        one_stream(engine, f"request {number}", *one, pick.random())
        for number, one in enumerate(asked)
    ]
    try:
        return await asyncio.gather(*streams)
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)


@pytest.mark.parametrize(
    ("count", "slots", "each", "num_kills"),
    [
        (12, 3, 4, 1),
        pytest.param(200, 4, 4, 3, marks=pytest.mark.full),
    ],
)
def test_a_crowd_of_adapters_through_few_slots(tmp_path, count, slots, each, num_kills):
    adapters = make_adapters(tmp_path, count)
    pick = random.Random(count)
    asked = [
        (adapter, pick.choice(PROMPTS), pick.randrange(8))
        for adapter in adapters
        for _ in range(each)
    ]
    pick.shuffle(asked)
    right = alone(adapters, asked)
    texts = {tuple(right[one]) for one in asked}
    assert len(texts) > count, "adapters can be told apart"

    async def serve():
        args = AsyncEngineArgs(
            **WISHES, max_loras=slots, max_cpu_loras=slots + 2, max_num_queued_reqs=1024
        )
        engine = AsyncLLM.from_engine_args(args)
        try:
            return await asyncio.wait_for(crowd(engine, adapters, asked, num_kills), 500)
        finally:
            engine.shutdown()

    found = asyncio.run(serve())
    assert [list(ids) for ids in found] == [list(right[one]) for one in asked]
