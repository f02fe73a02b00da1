"""The memory of adapters is not given to the KV cache."""

import msgspec
import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from tests.config import plans
from tests.config.test_device import H200

SIZE = 2_000_000
"""Values of one rank."""


@pytest.mark.parametrize("gpu", [None, H200])
def test_adapters_leave_less_for_blocks(gpu):
    machine = plans.make_machine(gpu=gpu, torch_cuda="13.0")
    own = plans.llama_8b() if gpu else plans.make_model()
    model = msgspec.structs.replace(own, adapter_size=SIZE)
    pool = {"max_model_len": 40_000, "max_num_seqs": 1024, "gpu_memory_utilization": 0.9}
    adapters = {"max_loras": 4, "max_lora_rank": 32, "max_cpu_loras": 9}

    def plan_of(**more):
        return resolve(EngineArgs(model="m", dtype="bfloat16", **pool, **more), model, machine)

    wide, plan = plan_of(), plan_of(enable_lora=True, **adapters)
    taken = (4 if gpu else 4 + 9) * SIZE * 32 * 2
    block = plan.memory.kv_cache_bytes // plan.memory.num_blocks
    assert abs(wide.memory.kv_cache_bytes - plan.memory.kv_cache_bytes - taken) < block
    assert "adapters" in plan.reasons["num_blocks"]
