"""What a plan's device becomes, and that the GPU's parts are there without one."""

from __future__ import annotations

import importlib

import pytest
import torch

from quire.config.kv_pool_size import MeasuredMemory
from quire.config.planning import gather_machine_facts, gather_model_facts
from quire.config.resolve.resolve import resolve
from quire.engine.core.builder import worker_config
from quire.errors import InvalidParameter, LoadError
from quire.executor import platform
from quire.executor.kv_sizing import blocks_for
from quire.executor.platform import open_platform
from quire.hardware.facts import GpuFacts
from quire.hardware.native import find_native
from quire.models import memories_of, plan_kv_pool, read_spec
from quire.models.layer_memory import NumberBytes
from quire.ops import CATALOG, Facts, Implementation, bind
from quire.testing import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny", "qwen3")


def plan_of(folder, machine=None, **wishes):
    from quire import EngineArgs

    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **wishes)
    return resolve(args, gather_model_facts(args), machine or gather_machine_facts())


@pytest.mark.parametrize(
    "name",
    ["devices.cuda", "devices.stream_device", "forward.decode_graphs", "devices.arena", "warm_up"],
)
def test_the_gpu_s_modules_import_without_one(name):
    importlib.import_module(f"quire.runner.{name}")


def test_determinism_is_promised_or_refused(folder, monkeypatch):
    plan = plan_of(folder, deterministic=True, device="cpu")
    if find_native()[0] is not None:
        assert open_platform(worker_config(plan)).ops.batch_invariant
    monkeypatch.setattr(platform, "open_runtime", lambda **_: None)
    plain = platform.select(device="cpu", dtype=torch.bfloat16, providers=["torch"])
    monkeypatch.setattr(platform, "select", lambda **_: plain)
    with pytest.raises(InvalidParameter, match="deterministic.*plain torch"):
        open_platform(worker_config(plan))
    assert not open_platform(worker_config(plan_of(folder, device="cpu"))).ops.batch_invariant


def test_the_log_says_who_serves_attention_and_why_nobody_better(folder, monkeypatch, caplog):
    facts = Facts(torch.device("cpu"), torch.float32)
    choosy = [
        Implementation(name, "choosy", print, lambda _: "is not in the mood")
        for name, record in CATALOG.items()
        if record.group == "kv"
    ]
    monkeypatch.setattr(platform, "select", lambda **_: bind(facts, choosy, ["choosy"]))
    monkeypatch.setattr(platform, "open_runtime", lambda **_: None)
    with caplog.at_level("INFO", logger=platform.__name__):
        open_platform(worker_config(plan_of(folder, device="cpu")))
    line = "Attention provider: torch (choosy: allocate_kv: is not in the mood)."
    assert line in caplog.messages


def test_blocks_are_what_was_measured_up_to_enough(folder):
    machine = gather_machine_facts()
    gpu = GpuFacts("GPU", (9, 0), 132, 80 << 30, 80 << 30)
    on_gpu = type(machine)(
        **{name: getattr(machine, name) for name in machine.__struct_fields__}
        | {"gpu": gpu, "torch_cuda": "13.0"}
    )
    plan = plan_of(folder, on_gpu, max_num_seqs=4, max_model_len=1000)
    config = worker_config(plan)
    memories = memories_of([read_spec(plan.model.hf_config)])
    pool = plan_kv_pool(memories, plan.memory.block_size, NumberBytes(2, 2))
    block_bytes = plan.memory.kv_cache_bytes // plan.memory.num_blocks
    gib = 1 << 30
    roomy = MeasuredMemory(80 * gib, 60 * gib, plan.memory.memory_utilization)
    assert blocks_for(config, pool, roomy, block_bytes) == 1 + 4 * 32
    tight = MeasuredMemory(10 * gib, 10 * gib - 9 * gib + 50 * block_bytes, 0.9)
    assert blocks_for(config, pool, tight, block_bytes) == 50
    for left in (0, 20):
        little = MeasuredMemory(10 * gib, gib + left * block_bytes, 0.9)
        with pytest.raises(LoadError, match=f"Pass max_model_len={max(0, left - 1) * 32} "):
            blocks_for(config, pool, little, block_bytes)
