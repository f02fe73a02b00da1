"""What a GPU does, as far as a CPU can show it: Triton kernels, a device that is late, two steps in
flight, a measured KV cache, and graphs that replay at fixed addresses give plain torch's tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_engine
from late_engines import plan_of

from quire.engine.builder import build_core
from quire.engine.target import Target
from quire.ops import select
from quire.runner.device import CpuDevice
from quire.runner.graphs import EagerForward
from quire.testing import make_checkpoint

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_engine_with_graphs(tmp_path):
    shape = {
        "num_hidden_layers": 1, "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 3,
    }  # fmt: skip
    folder = make_checkpoint(tmp_path, shape, "mistral", dtype="float32")
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    plain = Target(CpuDevice(), ops, lambda model, _: EagerForward(model))
    right = triton_engine.drain(build_core(plan_of(folder), plain))
    done = subprocess.run(
        [sys.executable, HERE / "triton_engine.py", folder],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == right
    assert found["replays"] >= 3, "decodes replay graphs"
    assert found["sizes"] == [3, 2, 1] * 2, "captured over the probe and over the real pool"
    assert found["num_blocks"] == triton_engine.NUM_BLOCKS
