"""Updates that meet a core's death, a start, adapters and sleep:
python -m tests.trainers.dead_cores.

A line for each: what the trainer is told, the answers, and whose weights each core has by its
checksums. After a core's death all answers are those of the old weights, or there are none, and a
whole update leaves the new ones everywhere. Trainers that die are in deaths.py, tensors that do not
fit in tests/executor/weight_transfer/test_updates.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.distributed.named_tensors import TensorMeta
from quire.distributed.shared_buffer import SharedBuffer
from quire.errors import EngineError, RequestError, WeightUpdateError
from quire.lora.request import LoRARequest
from quire.testing import make_checkpoint
from quire.trainers.clients import HTTPWeightSyncClient
from quire.trainers.senders import IPCTrainerInitInfo, WeightTransferTrainerFactory
from quire.trainers.sources import described
from tests.models.adapters.made import make_adapter
from tests.server.serve_process import command_of
from tests.trainers.deaths import SHAPE, Source
from tests.trainers.framework_calls import free_port

Step = Callable[[], Awaitable[Any]]


def engine_of(folder: Path, **wishes: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22,
            max_model_len=64, dtype="float32",
            **{"weight_transfer_config": {"backend": "ipc"}} | wishes,
        )
    )  # fmt: skip


def steps_of(engine: AsyncLLM, folder: Path, version: str = "new") -> list[tuple[str, Step]]:
    """The calls of an update, by their names."""
    pairs = list(Source(folder))
    metas = [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in pairs]
    buffer = SharedBuffer(sum(meta.nbytes for meta in metas))
    at = 0
    for _, tensor in pairs:
        buffer.write(at, tensor)
        at += tensor.nbytes
    info = described(metas) | {"ipc_handles": buffer.handle()}
    engine.kept = getattr(engine, "kept", []) + [buffer]  # as long as the engine
    return [
        ("start", engine.start_weight_update),
        ("update", lambda: engine.update_weights({"update_info": info})),
        ("prepare", engine._prepare_weight_update),
        ("commit", lambda: engine._commit_weight_update(version)),
    ]


async def asked(engine: AsyncLLM, **fields: Any) -> str:
    """What becomes of a few requests, of which each core gets some."""

    async def one(i: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        try:
            name = f"ask {i} {os.urandom(4).hex()}"
            prompt = {"prompt_token_ids": [1, 2, 3 + i]}
            outputs = [o async for o in engine.generate(prompt, params, name, **fields)]
        except EngineError as error:
            return str(error)
        completion = outputs[-1].outputs[0]
        return completion.error or f"answers ({(completion.weight_versions or [None])[0]})"

    found = await asyncio.gather(*(asyncio.wait_for(one(i), 60) for i in range(4)))
    return " | ".join(sorted({each[:90] for each in found}))


async def state(engine: AsyncLLM, known: dict[str, dict[str, str]], **fields: Any) -> str:
    sums = await engine.compute_weight_checksums()
    names = []
    for core in sorted({name.split(":")[0] for name in sums}):
        mine = {n.split(":", 1)[1]: d for n, d in sums.items() if n.startswith(core + ":")}
        name = next((name for name, theirs in known.items() if theirs == mine), "a mixture")
        names.append(f"{core} {name}")
    return f"{await asked(engine, **fields)}; weights: {', '.join(names)}"


async def whole_update(engine: AsyncLLM, folder: Path, version: str = "new") -> None:
    await engine.init_weight_transfer_engine({"init_info": {}})
    for _, step in steps_of(engine, folder, version):
        await step()


async def core_dies(folders: list[Path], known: Any, after: str, has_adapter: bool) -> bool:
    """One of two cores is killed after a call of the update; the trainer goes on. has_adapter: the
    requests have one.
    """
    engine = engine_of(folders[0], data_parallel_size=2, enable_lora=has_adapter)
    said, fields = "", adapted(folders[0]) if has_adapter else {}
    try:
        await engine.init_weight_transfer_engine({"init_info": {}})
        await asked(engine, **fields)
        for name, step in steps_of(engine, folders[1]):
            try:
                await step()
            except (EngineError, RequestError) as error:
                said = f"{name}: {error}"
                await engine._abandon_weight_update(str(error))
                break
            if name == after:
                os.kill(engine.front_end.client.core_status(1).pid, signal.SIGKILL)
        found = await state(engine, known, **fields)
        await whole_update(engine, folders[1])
        last = await state(engine, known, **fields)
    finally:
        engine.shutdown()
    what = "core with an adapter" if has_adapter else "core"
    print(f"{what} dies after {after}: {said[:120]!r}; {found}; then {last}", flush=True)
    whole = found.startswith("answers (None);") and "new" not in found
    return (whole or "answers (" not in found) and last.endswith("weights: dp0 new, dp1 new")


def adapted(folder: Path) -> dict[str, Any]:
    """What a request with an adapter has besides."""
    adapter = make_adapter(Path(tempfile.mkdtemp()) / "adapter", folder, 3)
    return {"lora_request": LoRARequest("a", 1, str(adapter))}


async def bits(engine: AsyncLLM, **fields: Any) -> tuple[Any, Any, int]:
    """Tokens and log-probabilities, and how many of its prompt's were found in blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompt = {"prompt_token_ids": [1 + i % 7 for i in range(40)]}
    stream = engine.generate(prompt, params, os.urandom(8).hex(), **fields)
    output = [output async for output in stream][-1]
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, output.num_cached_tokens


async def adapter_loads(folders: list[Path], known: Any) -> bool:
    """Requests whose adapter is being read when the update starts."""
    fields, found = adapted(folders[0]), []
    for folder, update in ((folders[0], True), (folders[1], False)):
        engine = engine_of(folder, enable_lora=True)
        try:
            await engine.init_weight_transfer_engine({"init_info": {}})
            asking = asyncio.create_task(asked(engine, **fields))
            await asyncio.sleep(0)
            if update:
                await whole_update(engine, folders[1])
            await asking
            found.append((await bits(engine, **fields))[:2])
        finally:
            engine.shutdown()
    print(f"adapter loads: same bits as a start with both: {found[0] == found[1]}", flush=True)
    return found[0] == found[1]


async def adapter_outlives(folders: list[Path], known: Any) -> bool:
    """An update meets an adapter whose requests have left blocks, and then the core dies."""
    fields = adapted(folders[0])
    engine = engine_of(folders[1], enable_lora=True)
    right = (await bits(engine, **fields))[:2]
    engine.shutdown()
    transfer = {"backend": "ipc", "snapshots": True}
    engine = engine_of(folders[0], enable_lora=True, weight_transfer_config=transfer)
    try:
        blocks = [(await bits(engine, **fields))[2] for _ in range(2)]
        await whole_update(engine, folders[1])
        found = [await bits(engine, **fields) for _ in range(2)]
        await engine.collective_rpc("settle_snapshot")
        os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)
        found.append(await bits(engine, **fields))
        last = await state(engine, known, **fields)
    finally:
        engine.shutdown()
    blocks += [cached for *_, cached in found]
    is_right = all(each[:2] == right for each in found)
    print(
        f"adapter, update, death: same bits as a start with both: {is_right}; cached tokens of "
        f"five requests: {blocks}; {last}",
        flush=True,
    )
    are_own = [bool(cached) for cached in blocks] == [False, True, False, True, False]
    return is_right and are_own and "'new'" in last and last.endswith("weights: dp0 new")


async def core_starts(folders: list[Path], known: Any, wait_s: float) -> bool:
    """A whole update that begins `wait_s` after a core was killed, while it starts again."""
    engine = engine_of(folders[0], data_parallel_size=2)
    said = ""
    try:
        await asked(engine)
        os.kill(engine.front_end.client.core_status(1).pid, signal.SIGKILL)
        await asyncio.sleep(wait_s)
        try:
            await whole_update(engine, folders[1])
        except (EngineError, RequestError) as error:
            said = str(error)
            await engine._abandon_weight_update(said)
        found = await state(engine, known)
        await whole_update(engine, folders[1])
        last = await state(engine, known)
    finally:
        engine.shutdown()
    print(f"core starts, {wait_s} s: {said[:120]!r}; {found}; then {last}", flush=True)
    ends = "weights: dp0 old, dp1 old" if said else "weights: dp0 new, dp1 new"
    return found.endswith(ends) and last.endswith("weights: dp0 new, dp1 new")


async def server_starts(folders: list[Path], known: Any) -> bool:
    """A trainer that calls a server while it starts, until a call is answered."""
    port = str(free_port())
    options = ("--enable-admin", "--api-key", "key", "--weight-transfer-config")
    command = command_of(str(folders[0]), *options, '{"backend": "ipc"}')
    command[command.index("--port") + 1] = port
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    client = HTTPWeightSyncClient(f"http://127.0.0.1:{port}", api_key="key")
    info, source, said = IPCTrainerInitInfo(), Source(folders[1]), []
    sender = None
    try:
        for _ in range(600):
            try:
                sender = WeightTransferTrainerFactory.trainer_init(
                    info, client=client, source=source
                )
                break
            except WeightUpdateError as error:
                said.append(str(error))
                await asyncio.sleep(0.1)
        assert sender is not None, said[-1]
        sender.send_weights("new")
        reply = httpx.post(
            f"http://127.0.0.1:{port}/weight_checker",
            json={"action": "checksum"}, headers={"Authorization": "Bearer key"}, timeout=60,
        )  # fmt: skip
        sums = {n.split(":", 1)[1]: d for n, d in reply.json()["checksums"].items()}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    is_new = sums == known["new"]
    refusals = {each.split(":")[1].strip()[:40] for each in said}
    print(
        f"server starts: {len(said)} calls were refused: {refusals}; then new: {is_new}", flush=True
    )
    return is_new


async def sleeps(folders: list[Path], known: Any) -> bool:
    """An update of sleeping weights, and sleep during an update."""
    engine = engine_of(folders[0], enable_sleep_mode=True)
    said = []
    try:
        await engine.init_weight_transfer_engine({"init_info": {}})
        steps = dict(steps_of(engine, folders[1]))
        asleep = [lambda: engine.sleep(level=2), steps["start"]]
        for sequence in (asleep, [engine.wake_up, steps["start"], asleep[0]]):
            try:
                for step in sequence:
                    await step()
            except (EngineError, RequestError) as error:
                said.append(str(error))
        await engine._abandon_weight_update("over")
        found = await state(engine, known)
    finally:
        engine.shutdown()
    print(f"sleep: {said}; {found}", flush=True)
    return len(said) == 2 and found.endswith("dp0 old")


async def main() -> int:
    base = Path(tempfile.mkdtemp())
    folders = [make_checkpoint(base / str(s), SHAPE, "qwen3", s, "float32") for s in (0, 1)]
    known = {}
    for name, folder in zip(("old", "new"), folders, strict=True):
        engine = engine_of(folder)
        sums = await engine.compute_weight_checksums()
        known[name] = {n.split(":", 1)[1]: d for n, d in sums.items()}
        engine.shutdown()
    moments = ("start", "update", "prepare")
    results = [await core_dies(folders, known, after, False) for after in moments]
    results.append(await core_dies(folders, known, "update", True))
    results += [await core_starts(folders, known, wait_s) for wait_s in (0.0, 0.7)]
    results += [
        await scene(folders, known)
        for scene in (server_starts, sleeps, adapter_loads, adapter_outlives)
    ]
    print("failed:", results.count(False))
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
