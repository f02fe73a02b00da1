"""Calls that RL frameworks make of an engine, played against a tiny model:
python -m tests.trainers.framework_calls [FRAMEWORK ...].

A scene names the source of its calls; docs/weight_updates.md lists those that are left out. It
begins with an engine of random weights (or those of another seed) and ends when the engine's
tokens and log-probabilities are to the bit those of an engine that is started with the weights that
were sent, and those of a forward of transformers but for rounding. The last line is JSON: seconds,
answers that were compared and the largest difference by framework. Frameworks' own modules allocate
on GPUs when they are imported or called, or want Ray; what they do there is in
framework_workers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch

SHAPE = {"num_hidden_layers": 2, "vocab_size": 320}
PROMPT = list(range(3, 20))
WORKERS = "tests.trainers.framework_workers."


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def folders(base: Path) -> list[Path]:
    from quire.testing import make_checkpoint

    return [make_checkpoint(base / str(s), SHAPE, "qwen3", s, "float32") for s in (0, 1)]


def module_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def difference(folder: Path, completion: Any) -> float:
    """See `compared`."""
    return compared(folder, *answer(completion))


def answer(completion: Any) -> tuple[list[int], list[float]]:
    """The tokens and their log-probabilities."""
    logprobs = [next(iter(p.values())).logprob for p in completion.logprobs]
    return list(completion.token_ids), logprobs


def compared(folder: Path, ids: list[int], mine: list[float]) -> float:
    """The largest difference of log-probabilities from a forward of transformers with the weights
    of `folder`. Asserts that an engine which is started with them gives the same bits.
    """
    with torch.no_grad():
        logits = module_of(folder)(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    theirs = logits.log_softmax(-1)[range(len(ids)), ids]
    assert (ids, mine) == started(folder, len(ids)), "others than those of a start"
    COMPARED.append(folder)
    return float((torch.tensor(mine) - theirs).abs().max())


COMPARED: list[Path] = []
"""The folders whose answers were compared."""


@lru_cache
def started(folder: Path, max_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy tokens of an engine that is started with the weights of `folder`, and their
    log-probabilities.
    """
    from quire import LLM

    wishes = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    with LLM(str(folder), **wishes) as llm:
        prompt = {"prompt_token_ids": PROMPT}
        [output] = llm.generate([prompt], params(max_tokens), use_tqdm=False)
    return answer(output.outputs[0])


def params(max_tokens: int = 6) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)


async def generated(engine: Any, max_tokens: int = 6, **fields: Any) -> Any:
    from vllm.inputs import TokensPrompt
    from vllm.utils import random_uuid

    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    stream = engine.generate(prompt, params(max_tokens), request_id=random_uuid(), **fields)
    return [output async for output in stream][-1].outputs[0]


def async_engine(folder: Path, **wishes: Any) -> Any:
    import vllm

    args = vllm.AsyncEngineArgs(
        model=str(folder), max_model_len=64, kv_cache_memory_bytes=1 << 22, dtype="float32",
        enable_sleep_mode=True, **wishes,
    )  # fmt: skip
    return vllm.AsyncLLMEngine.from_engine_args(args)


async def while_engine(asked: Any, call: Any, *args: Any) -> Any:
    """Do the trainer's part while the engine does what was asked of it, whose failure is raised
    without waiting for the other one.
    """
    loop = asyncio.get_running_loop()
    mine = loop.create_future()

    def tell(set_it: Any, value: Any) -> None:
        if not mine.done():
            set_it(value)

    def act() -> None:
        try:
            told = mine.set_result, call(*args)
        except BaseException as error:
            told = mine.set_exception, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *told)

    # a thread that waits for an engine that has failed must not keep the program from its end
    threading.Thread(target=act, daemon=True).start()
    theirs = asyncio.ensure_future(asked)
    await asyncio.wait([mine, theirs], return_when=asyncio.FIRST_EXCEPTION)
    if not theirs.done():
        mine.result()
    await theirs
    return await mine


async def openrlhf(base: Path) -> float:
    """openrlhf 0.11.2, trainer/ray/vllm_engine.py (RolloutRayActor) and ppo_actor.py."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    old, new = folders(base)
    engine = async_engine(old, worker_extension_cls=WORKERS + "OpenRLHFWorker")
    assert not await engine.is_sleeping()
    port = free_port()
    args = ("127.0.0.1", port, 1, 2, "openrlhf", "nccl", False)

    def join() -> Any:
        return PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 0, 2), "cpu")

    group = await while_engine(engine.collective_rpc("init_process_group", args=args), join)
    running = asyncio.create_task(generated(engine))
    await engine.pause_generation(mode="keep")
    for name, tensor in module_of(new).named_parameters():
        what = (name, "float32", list(tensor.shape), False)
        update = engine.collective_rpc("update_weight", args=what)
        await while_engine(update, group.broadcast, tensor.data, 0)
    await engine.reset_prefix_cache()
    await engine.resume_generation()
    await running
    assert engine.output_processor.get_num_unfinished_requests() == 0
    found = difference(new, await generated(engine))
    await engine.sleep(level=1)
    for tag in ("weights", "kv_cache"):
        await engine.wake_up(tags=[tag])
    found = max(found, difference(new, await generated(engine)))
    engine.shutdown()
    return found


def send_buckets(address: str, module: Any) -> None:
    """verl's BucketedWeightSender with shared memory, in buckets of 256 KiB."""
    import zmq

    link = zmq.Context.instance().socket(zmq.REQ)
    link.bind(address)
    shared = shared_memory.SharedMemory(create=True, size=1 << 18)
    link.send_json({"name": shared.name})
    link.recv()
    bucket: list[Any] = []
    at = 0

    def send(is_last: bool) -> None:
        link.send_json({"bucket": bucket, "is_last": is_last})
        link.recv()

    for name, tensor in module.named_parameters():
        if at + tensor.nbytes > shared.size:
            send(False)
            bucket, at = [], 0
        data = tensor.data.contiguous().view(-1).view(torch.uint8)
        room = torch.frombuffer(shared.buf, dtype=torch.uint8)
        room[at : at + len(data)].copy_(data)
        del room
        bucket.append((name, "float32", list(tensor.shape), at, len(data)))
        at += len(data)
    send(True)
    link.close()
    shared.close()
    shared.unlink()


async def verl(base: Path) -> float:
    """verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py (vLLMHttpServer), but for
    `monkey_patch_model`, which replaces the model's compute_logits, and `abort_requests` of the
    output processor, in whose place is `abort`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    old, new = folders(base)
    flags = [
        *("--model", str(old), "--load_format", "dummy", "--dtype", "float32"),
        *("--max_model_len", "64", "--enable_sleep_mode", "--logprobs_mode", "processed_logprobs"),
        *("--kv-cache-memory-bytes", str(1 << 22)),
        *("--worker_extension_cls", WORKERS + "VerlWorker"),
    ]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    usage = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=usage)
    engine = AsyncLLM.from_vllm_config(
        vllm_config=config, usage_context=usage,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )  # fmt: skip
    await engine.reset_mm_cache()
    tasks = await engine.get_supported_tasks()
    app = build_app(args, supported_tasks=tasks, model_config=engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    await engine.sleep(level=2)
    await engine.wake_up(tags=["weights"])
    address = f"ipc://{base}/verl.sock"
    kwargs = {"peft_config": {"socket": address}, "base_sync_done": False, "use_shm": True}
    update = engine.collective_rpc("update_weights_from_ipc", kwargs=kwargs)
    await while_engine(update, send_buckets, address, module_of(new))
    await engine.wake_up(tags=["kv_cache"])
    await engine.reset_prefix_cache(reset_connector=True)
    found = difference(new, await generated(engine, lora_request=None, priority=0))
    running = asyncio.create_task(generated(engine, max_tokens=45))
    assert await engine.list_loras() == set()
    while not (names := list(engine.output_processor.request_states.keys())):
        await asyncio.sleep(0)
    await engine.abort(names, internal=True)
    assert (await running).finish_reason == "abort"
    await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
    await engine.resume_generation()
    await engine.wait_for_requests_to_drain()
    assert not await engine.is_sleeping()
    await engine.reset_encoder_cache()
    found = max(found, difference(new, await generated(engine)))
    engine.shutdown()
    return found


async def skyrl(base: Path) -> float:
    """SkyRL's remote engines: routes of `vllm serve`, with the
    functions of the first releases of weight transfer on the trainer's side.
    """
    import httpx
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    old, new = folders(base)
    port, key = free_port(), "key"
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(old)),
        *("--port", str(port), "--max-model-len", "64", "--dtype", "float32"),
        *("--enable-admin", "--api-key", key, "--kv-cache-memory-bytes", str(1 << 22)),
        *("--enable-sleep-mode", "--weight-transfer-config", '{"backend": "nccl"}'),
    )
    head = {"Authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as web:

        async def post(path: str, **body: Any) -> Any:
            reply = await web.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json() if reply.content else None

        for _ in range(600):
            try:
                if (await web.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        world = (await web.get("/get_world_size")).json()["world_size"] + 1
        info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world}
        meeting = post("/init_weight_transfer_engine", init_info=info | {"rank_offset": 1})
        group = await while_engine(meeting, NCCLWeightTransferEngine.trainer_init, info)
        await post("/pause?mode=keep")
        pairs = [(name, p.data) for name, p in module_of(new).named_parameters()]
        update = {
            "names": [name for name, _ in pairs],
            "dtype_names": ["float32"] * len(pairs),
            "shapes": [list(tensor.shape) for _, tensor in pairs],
            "packed": True,
        }
        updating = post("/update_weights", update_info=update)
        send = NCCLWeightTransferEngine.trainer_send_weights
        args = NCCLTrainerSendWeightsArgs(group=group, packed=True)
        await while_engine(updating, send, iter(pairs), args)
        await post("/reset_prefix_cache")
        await post("/resume")
        await post("/collective_rpc", method="count_weight_changes", args=[], kwargs={})

        async def ask() -> float:
            body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            [choice] = (await post("/v1/completions", **body))["choices"]
            return compared(new, choice["token_ids"], choice["logprobs"]["token_logprobs"])

        found = await ask()
        await post("/sleep?level=1")
        await post("/wake_up")
        found = max(found, await ask())
    server.terminate()
    await server.wait()
    return found


async def prime_rl(base: Path) -> float:
    """prime-rl, inference/vllm/server.py and worker: routes that it
    adds to the app, weights from folders, adapters of one name in place.
    """
    import httpx
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Mount, Route
    from vllm.entrypoints.openai import api_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tests.models.adapters.made import make_adapter

    old, new = folders(base)
    flags = [
        *("--model", str(old), "--dtype", "float32", "--max-model-len", "64"),
        *("--kv-cache-memory-bytes", str(1 << 22), "--enable-lora"),
        *("--worker-extension-cls", WORKERS + "PrimeWorker"),
    ]
    os.environ["QUIRE_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    engine = async_engine(old, enable_lora=True, worker_extension_cls=WORKERS + "PrimeWorker")
    tasks = await engine.get_supported_tasks()
    build, init = api_server.build_app, api_server.init_app_state

    def build_app(*given: Any, **named: Any) -> Any:
        inner = build(*given, **named)

        async def update(request: Any) -> Any:
            folder = (await request.json())["weight_dir"]
            await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.collective_rpc("update_weights_from_path", args=(folder,))
            await engine.resume_generation()
            return JSONResponse({"status": "ok"})

        added = Route("/update_weights", update, methods=["POST"])
        app = Starlette(routes=[added, Mount("/", inner)])
        app.state = inner.state
        return app

    app = build_app(args, tasks, engine.model_config)
    await init(engine, app.state, args, tasks)
    await engine.collective_rpc("init_broadcaster")
    assert await engine.collective_rpc("liveness_probe") == [True]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as web:
        reply = await web.post("/update_weights", json={"weight_dir": str(new)})
        assert reply.json() == {"status": "ok"}, reply.text
        adapter = make_adapter(base / "adapter", new, 3)
        body = {"lora_name": "policy", "lora_path": str(adapter), "load_inplace": True}
        for _ in range(2):  # after each step, under one name
            reply = await web.post("/v1/load_lora_adapter", json=body)
            assert reply.status_code == 200, reply.text
        body = {"model": "policy", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        assert (await web.post("/v1/completions", json=body)).status_code == 200
        body = {"prompt": PROMPT, "max_tokens": 2, "cache_salt": "1", "temperature": 0}
        assert (await web.post("/v1/completions", json=body)).status_code == 200
    found = difference(new, await generated(engine))
    engine.shutdown()
    return found


async def nemo_rl(base: Path) -> float:
    """NeMo-RL, models/generation/vllm/vllm_worker.py, with
    `reset_mm_cache` in place of `renderer.clear_mm_cache`.
    """
    import zmq
    from vllm import LLM
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    old, new = folders(base)
    llm = LLM(
        model=str(old), load_format="dummy", dtype="float32", max_model_len=64, seed=1,
        kv_cache_memory_bytes=1 << 22, enable_sleep_mode=True, disable_log_stats=False,
        worker_extension_cls=WORKERS + "NemoWorker",
    )  # fmt: skip
    assert llm.collective_rpc("report_device_id", args=()) == ["host-0"]
    llm.collective_rpc("bind_numa")
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    module = module_of(new)
    refit = {name: ("float32", list(p.shape)) for name, p in module.named_parameters()}
    llm.collective_rpc("prepare_refit_info", args=(json.dumps(refit),))
    address = f"ipc://{base}/nemo.sock"

    def send() -> None:
        link = zmq.Context.instance().socket(zmq.REQ)
        link.bind(address)
        for name, tensor in module.named_parameters():
            for part in (name.encode(), tensor.data.numpy().tobytes()):
                link.send(part)
                link.recv()
        link.send(b"end")
        link.recv()
        link.close()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert llm.collective_rpc("update_weights_via_ipc_zmq", args=(address,)) == [True]
    sender.join()
    llm.wake_up(tags=["kv_cache"])
    llm.llm_engine.reset_prefix_cache()
    llm.llm_engine.reset_mm_cache()
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params(), use_tqdm=False)
    assert llm.get_metrics()
    found = difference(new, output.outputs[0])
    llm.sleep(level=1)
    llm.wake_up()
    port, third = free_port(), module_of(old)
    named = [(name, p.data) for name, p in third.named_parameters()]

    def send_packed() -> None:
        group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2)
        communicator = PyNcclCommunicator(group, "cpu")
        for i in range(0, len(named), 2):
            parts = [t.contiguous().view(-1).view(torch.uint8) for _, t in named[i : i + 2]]
            communicator.broadcast(torch.cat(parts), 0)

    sender = threading.Thread(target=send_packed, daemon=True)
    sender.start()
    llm.collective_rpc("init_collective", args=(0, "127.0.0.1", port, 2, 1))
    assert llm.collective_rpc("update_weights_from_collective") == [True]
    sender.join()
    llm.llm_engine.reset_prefix_cache()
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params(), use_tqdm=False)
    llm.collective_rpc("cleanup")
    return max(found, difference(old, output.outputs[0]))


async def open_instruct(base: Path) -> float:
    """open-instruct, vllm_utils.py, but for `get_kv_cache_spec` of
    workers.
    """
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    old, new = folders(base)
    engine = async_engine(old, weight_transfer_config={"backend": "nccl"})
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    request = {"init_info": info | {"rank_offset": 1}}
    meeting = engine.init_weight_transfer_engine(request)
    group = await while_engine(meeting, NCCLWeightTransferEngine.trainer_init, info)
    running = asyncio.create_task(generated(engine))
    await engine.sleep(level=0, mode="keep")
    pairs = [(name, p.data) for name, p in module_of(new).named_parameters()]
    update = {
        "names": [name for name, _ in pairs],
        "dtype_names": ["float32"] * len(pairs),
        "shapes": [list(tensor.shape) for _, tensor in pairs],
        "packed": True,
    }
    updating = engine.update_weights({"update_info": update})
    send = NCCLWeightTransferEngine.trainer_send_weights
    args = NCCLTrainerSendWeightsArgs(group=group, packed=True)
    await while_engine(updating, send, iter(pairs), args)
    await engine.reset_prefix_cache()
    await engine.wake_up(tags=["scheduling"])
    await running
    found = difference(new, await generated(engine))
    engine.shutdown()
    return found


async def vllm_examples(base: Path) -> float:
    """vLLM's own programs of the first releases of weight transfer, rlhf_nccl.py: requests made of
    its dataclasses.
    """
    import vllm
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    old, new = folders(base)
    llm = vllm.LLM(
        model=str(old), load_format="dummy", dtype="float32", max_model_len=64,
        kv_cache_memory_bytes=1 << 22, weight_transfer_config=WeightTransferConfig(backend="nccl"),
    )  # fmt: skip
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    asked = NCCLWeightTransferInitInfo(**info, rank_offset=1)
    request = WeightTransferInitRequest(init_info=asdict(asked))
    meeting = asyncio.to_thread(llm.init_weight_transfer_engine, request)
    theirs = NCCLWeightTransferInitInfo(**info, rank_offset=0)
    group = await while_engine(meeting, NCCLWeightTransferEngine.trainer_init, theirs)
    pairs = [(name, p.data) for name, p in module_of(new).named_parameters()]
    update = NCCLWeightTransferUpdateInfo(
        names=[name for name, _ in pairs],
        dtype_names=["float32"] * len(pairs),
        shapes=[list(tensor.shape) for _, tensor in pairs],
        packed=True,
    )
    llm.start_weight_update(is_checkpoint_format=True)
    request = WeightTransferUpdateRequest(update_info=asdict(update))
    updating = asyncio.to_thread(llm.update_weights, request)
    args = NCCLTrainerSendWeightsArgs(group=group, packed=True)
    await while_engine(updating, NCCLWeightTransferEngine.trainer_send_weights, iter(pairs), args)
    llm.finish_weight_update()
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params(), use_tqdm=False)
    return difference(new, output.outputs[0])


SCENES = {
    "openrlhf": openrlhf,
    "verl": verl,
    "skyrl": skyrl,
    "prime-rl": prime_rl,
    "nemo-rl": nemo_rl,
    "open-instruct": open_instruct,
    "vllm-examples": vllm_examples,
}


def figures(began: float, count: int, most: float) -> dict[str, Any]:
    """The result of a scene."""
    return {"s": round(time.perf_counter() - began, 1), "compared": count, "difference": most}


def main(names: list[str]) -> int:
    """Play the scenes; the exit code is 1 where one fails."""
    if find_spec("vllm") is None:  # again, so that processes that it starts have the name, too
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_HOST_IP": "127.0.0.1"}
        program = [sys.executable, "-m", "quire.as_vllm", __file__, *names]
        return subprocess.run(program, check=False).returncode
    results: dict[str, Any] = {}
    for name in names or list(SCENES):
        began, before = time.perf_counter(), len(COMPARED)
        try:
            with tempfile.TemporaryDirectory() as base:
                most = asyncio.run(asyncio.wait_for(SCENES[name](Path(base)), 200))
            results[name] = figures(began, len(COMPARED) - before, most)
        except Exception as error:
            import traceback

            traceback.print_exc()
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(name, results[name], flush=True)
    print(json.dumps(results))
    return int(any(each.get("difference", 1) > 3e-4 for each in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
