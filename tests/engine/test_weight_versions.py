"""Streams across weight updates: each span of tokens has the log-probabilities of a forward with
the weights of its version; cores that die, and updates that fail on one of several cores.
"""

import asyncio
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.distributed.named_tensors import TensorMeta
from quire.distributed.shared_buffer import SharedBuffer
from quire.errors import WeightMismatch
from quire.testing import make_checkpoint
from quire.trainers.sources import described

SHAPE = {"num_hidden_layers": 2, "vocab_size": 300}
PROMPT = list(range(3, 20))
LENGTH = 48


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return [make_checkpoint(base / str(s), SHAPE, "qwen3", s, "float32") for s in (0, 1)]


def args_of(folder, **wishes):
    return AsyncEngineArgs(
        str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, max_model_len=256,
        dtype="float32", **{"weight_transfer_config": {"backend": "ipc"}} | wishes,
    )  # fmt: skip


def run(folder, scene, **wishes):
    async def play():
        engine = AsyncLLM.from_engine_args(args_of(folder, **wishes))
        try:
            await engine.init_weight_transfer_engine({"init_info": {}})
            return await scene(engine)
        finally:
            engine.shutdown()

    return asyncio.run(asyncio.wait_for(play(), 120))


async def update(engine, folder, version, *, without=None):
    pairs = [(n, t) for n, t in load_file(folder / "model.safetensors").items() if n != without]
    metas = [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in pairs]
    buffer = SharedBuffer(sum(meta.nbytes for meta in metas))
    at = 0
    for _, tensor in pairs:
        buffer.write(at, tensor)
        at += tensor.nbytes
    try:
        await engine.start_weight_update()
        await engine.update_weights(
            {"update_info": described(metas) | {"ipc_handles": buffer.handle()}}
        )
        await engine.finish_weight_update(version)
    finally:
        buffer.close()


async def generated(engine, name, *, n=1, temperature=0.0, seen=None, length=LENGTH):
    params = SamplingParams(
        n=n, temperature=temperature, max_tokens=length, ignore_eos=True, logprobs=0, seed=3
    )
    async for output in engine.generate({"prompt_token_ids": PROMPT}, params, name):
        if seen is not None and min(len(one.token_ids) for one in output.outputs) >= 4:
            seen.set()
    return output


def log_probs(folder, ids):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = module(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), ids]


def check_spans(completion, folder_of, start=0):
    ids = completion.token_ids
    spans = completion.weight_versions
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
    assert spans[-1].end == len(ids)
    mine = torch.tensor([next(iter(p.values())).logprob for p in completion.logprobs])
    for span in spans:
        right = log_probs(folder_of[span.version], ids)[span.start : span.end]
        assert torch.allclose(mine[span.start : span.end], right, atol=3e-4), span
    return [span.version for span in spans]


@pytest.mark.parametrize("mode", ["keep", "abort", "wait", None])
def test_each_span_is_of_the_version_that_it_reports(folders, mode):
    """With K/V that is computed again under the new weights, or with none that is older."""
    folder_of = {"default": folders[0], "new": folders[1]}

    async def scene(engine):
        seen = asyncio.Event()
        running = asyncio.create_task(generated(engine, "a", n=2, temperature=0.7, seen=seen))
        await seen.wait()
        if mode is not None:
            await engine.pause_generation(mode=mode, clear_cache=True)
        later = asyncio.create_task(generated(engine, "b"))
        await update(engine, folders[1], "new")
        if mode is not None:
            await engine.resume_generation()
        return await running, await later

    first, later = run(folders[0], scene)
    assert check_spans(later.outputs[0], folder_of) == ["new"]
    reasons = {one.finish_reason for one in first.outputs}
    for completion in first.outputs:
        if mode == "keep":
            assert check_spans(completion, folder_of) == ["default", "new"]
        elif mode is None:  # its K/V is older: only the versions are to be right
            assert [s.version for s in completion.weight_versions] == ["default", "new"]
        else:
            assert completion.weight_versions is None
            mine = [next(iter(p.values())).logprob for p in completion.logprobs]
            right = log_probs(folders[0], completion.token_ids)
            assert torch.allclose(torch.tensor(mine), right, atol=3e-4)
    assert reasons == {"abort" if mode == "abort" else "length"}


def test_a_core_that_dies_after_an_update_does_not_answer_with_the_old_weights(folders):
    async def scene(engine):
        await update(engine, folders[1], "new")
        right = (await generated(engine, "a", length=4)).outputs[0]
        os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)
        ended = (await generated(engine, "b", length=4)).outputs[0]
        assert ended.finish_reason == "error"
        assert "restarted after its weights were updated to the version 'new'" in ended.error
        await engine.init_weight_transfer_engine({"init_info": {}})
        await update(engine, folders[1], "new")
        again = (await generated(engine, "c", length=4)).outputs[0]
        assert again.token_ids == right.token_ids and again.logprobs == right.logprobs

    run(folders[0], scene)


def test_an_update_ends_on_all_cores_or_on_none(folders):
    name = "model.layers.1.self_attn.k_proj.weight"

    async def scene(engine):
        await update(engine, folders[1], "one")
        assert await engine.get_weight_version() == "one"
        sums = await engine.compute_weight_checksums()
        with pytest.raises(WeightMismatch, match="did not come"):
            await update(engine, folders[0], "two", without=name)
        ends = await asyncio.gather(*(generated(engine, str(i), length=4) for i in range(4)))
        assert {end.outputs[0].finish_reason for end in ends} == {"error"}
        assert await engine.get_weight_version() == "one"
        await update(engine, folders[1], "three")
        assert await engine.compute_weight_checksums() == sums
        ends = await asyncio.gather(*(generated(engine, f"b{i}", length=4) for i in range(4)))
        assert {end.outputs[0].weight_versions[0].version for end in ends} == {"three"}

    run(folders[0], scene, data_parallel_size=2)


@pytest.mark.full
@pytest.mark.parametrize("cores", [1, 2])
def test_a_core_that_dies_comes_back_with_the_updated_weights_of_a_snapshot(
    folders, cores, tmp_path, monkeypatch
):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))

    async def scene(engine):
        client = engine.front_end.client
        await update(engine, folders[1], "new")
        right = (await generated(engine, "a", length=8)).outputs[0]
        sums = await engine.compute_weight_checksums()
        await engine.collective_rpc("settle_snapshot")
        for core in range(cores):
            os.kill(client.core_status(core).pid, signal.SIGKILL)
        again = (await generated(engine, "b", length=8)).outputs[0]
        assert again.token_ids == right.token_ids and again.logprobs == right.logprobs
        assert [span.version for span in again.weight_versions] == ["new"]
        assert await engine.get_weight_version() == "new"
        assert await engine.compute_weight_checksums() == sums
        [*files] = tmp_path.glob("updated/*.weights")
        assert len(files) == cores
        for file in files:
            file.write_bytes(file.read_bytes()[:4096])
        os.kill(client.core_status(0).pid, signal.SIGKILL)
        ends = await asyncio.gather(*(generated(engine, f"c{i}", length=2) for i in range(4)))
        failed = [end.outputs[0].error for end in ends if end.outputs[0].error]
        assert failed and all("its snapshot cannot be read" in error for error in failed)
        await engine.init_weight_transfer_engine({"init_info": {}})
        with pytest.raises(WeightMismatch, match="Send all"):
            await update(engine, folders[1], "new", without="model.norm.weight")
        await update(engine, folders[1], "new")
        last = (await generated(engine, "d", length=8)).outputs[0]
        assert last.token_ids == right.token_ids

    config = {"backend": "ipc", "snapshots": True}
    run(folders[0], scene, data_parallel_size=cores, weight_transfer_config=config)
    assert not [*tmp_path.glob("updated/*.weights")]
