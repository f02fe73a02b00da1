"""Modules of OpenRLHF and verl that call the engine, as installed: python -m
tests.trainers.installed_modules [FRAMEWORK ...].

Needs the packages beside quire, without what they depend on but for what these modules import:
`pip install --no-deps openrlhf verl`, `pip install ray orjson tensordict omegaconf hydra-core
codetiming torchdata pylatexenc datasets peft aiohttp`. Nothing of theirs is changed. They ask for
GPUs where tensors are made: a mode of torch makes those on the CPU, and CUDA's stream is None.

OpenRLHF: the class of `RolloutRayActor`, outside of Ray, with its `WorkerWrap` in the worker, and
`stateless_init_process_group` on the trainer's side. verl: `BucketedWeightSender` and
`BucketedWeightReceiver`; its worker extension is not imported, as it replaces methods of vLLM's
managers of adapters. Importing verl takes 30 s of a processor and more, in the trainer and in the
worker. The answers are those of framework_calls.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.trainers.framework_calls import (
    COMPARED,
    PROMPT,
    async_engine,
    difference,
    figures,
    folders,
    free_port,
    generated,
    module_of,
    params,
    while_engine,
)

LONGEST_S = 200
MODULE = "tests.trainers.installed_modules."


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class OpenRLHFWorker:
    """`WorkerWrap` with a default group of torch, and no GPU."""

    def _theirs(self, method: str, *args: Any) -> Any:
        from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        with OnCpu(), mock.patch.object(torch.cuda, "current_stream", lambda: None):
            return getattr(WorkerWrap, method)(self, *args)

    def init_process_group(self, *args: Any) -> Any:
        return self._theirs("init_process_group", *args)

    def update_weight(self, *args: Any) -> Any:
        return self._theirs("update_weight", *args)


async def openrlhf(base: Path) -> float:
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from openrlhf.utils.distributed_util import stateless_init_process_group

    old, new = folders(base)
    os.environ["RAY_ADDRESS"] = "none"
    theirs = RolloutRayActor.__ray_metadata__.modified_class
    actor = theirs.__new__(theirs)
    await actor.__init__(
        model=str(old), worker_extension_cls=MODULE + "OpenRLHFWorker", enforce_eager=True,
        tensor_parallel_size=1, seed=1, distributed_executor_backend="uni", max_model_len=64,
        enable_prefix_caching=False, dtype="float32", trust_remote_code=True,
        full_determinism=False, bundle_indices=None, num_gpus=0.2, enable_sleep_mode=True,
        agent_func_path=None, remote_rm_url=None, mm_pad_token_ids=set(),
        kv_cache_memory_bytes=1 << 22, logprobs_mode="processed_logprobs", max_logprobs=1,
    )  # fmt: skip
    port = free_port()
    joining = actor.init_process_group("127.0.0.1", port, 1, 2, "openrlhf", "nccl", False)
    group = await while_engine(
        joining, stateless_init_process_group, "127.0.0.1", port, 0, 2, torch.device("cpu")
    )
    running = asyncio.create_task(actor.generate(PROMPT, params()))
    await actor.pause_generation()
    for name, tensor in module_of(new).named_parameters():
        update = actor.update_weight(name, tensor.dtype, tensor.shape)
        await while_engine(update, group.broadcast, tensor.data, 0)
    await actor.reset_prefix_cache()
    await actor.resume_generation()
    await running
    assert actor.get_num_unfinished_requests() == 0
    found = difference(new, (await actor.generate(PROMPT, params())).outputs[0])
    await actor.sleep()
    await actor.wake_up()
    found = max(found, difference(new, (await actor.generate(PROMPT, params())).outputs[0]))
    actor.llm.shutdown()
    return found


class VerlWorker:
    """What verl's extension does with its receiver."""

    def update_weights_from_ipc(self, address: str) -> None:
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
        from verl.workers.rollout.vllm_rollout.weight_update_utils import split_buffer_updates

        def load(weights: list[Any], is_last: bool) -> None:
            model = self.model_runner.model
            parameters, buffers, _ = split_buffer_updates(model, weights)
            assert not buffers
            model.load_weights(parameters)

        receiver = bucketed_weight_transfer.BucketedWeightReceiver(
            address, self.device, use_shm=True
        )
        with no_device(bucketed_weight_transfer):
            receiver.receive_weights(on_bucket_received=load)


def no_device(module: Any) -> Any:
    """verl's module of the device, where there is none."""
    device = mock.MagicMock()
    return mock.patch.object(module, "get_torch_device", lambda: device)


async def verl(base: Path) -> float:
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

    old, new = folders(base)
    engine = async_engine(old, load_format="dummy", worker_extension_cls=MODULE + "VerlWorker")
    await engine.sleep(level=2)
    await engine.wake_up(tags=["weights"])
    address = f"ipc://{base}/verl.sock"
    sender = bucketed_weight_transfer.BucketedWeightSender(address, 1, use_shm=True)
    module = module_of(new)

    def send() -> None:
        with no_device(bucketed_weight_transfer):
            asyncio.run(sender.async_send_weights(iter(module.state_dict().items())))

    update = engine.collective_rpc("update_weights_from_ipc", args=(address,))
    await while_engine(update, send)
    await engine.wake_up(tags=["kv_cache"])
    await engine.reset_prefix_cache(reset_connector=True)
    found = difference(new, await generated(engine))
    engine.shutdown()
    return found


SCENES = {"openrlhf": openrlhf, "verl": verl}


def main(names: list[str]) -> int:
    """Play the scenes; the exit code is 1 where one fails."""
    if find_spec("vllm") is None:
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_HOST_IP": "127.0.0.1"}
        program = [sys.executable, "-m", "quire.as_vllm", __file__, *names]
        return subprocess.run(program, check=False).returncode
    results = {}
    for name in names or list(SCENES):
        began, before = time.perf_counter(), len(COMPARED)
        with tempfile.TemporaryDirectory() as base:
            most = asyncio.run(asyncio.wait_for(SCENES[name](Path(base)), LONGEST_S))
        results[name] = figures(began, len(COMPARED) - before, most)
    print(json.dumps(results))
    return int(any(each["difference"] > 3e-4 for each in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
