"""Families over two workers: the bits of one, or a refusal that names what cannot be cut."""

import numpy as np
import pytest

from quire import SamplingParams
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import LoadError
from quire.hardware.native import find_native
from tests.executor.worker_cores import open_core, same_bits, serve
from tests.models.hostile.mixtures import MIXTURES
from tests.models.hostile.models import DENSE, HOSTILE, cases, write

IS_NATIVE = find_native()[0] is not None
OTHERS = ("gpt_oss", "olmo2", "gemma3n", "gemma4", "deepseek_v3")
"""Experts, norms of whole rows, gates of the largest, keys and values of other layers, latents."""


def requests():
    draw = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1)
    return [
        EngineCoreRequest(
            handle,
            draw.integers(3, 96, int(draw.integers(2, 30))).tolist(),
            params.clone(),
            seed=handle,
            arrival_time=0.0,
        )
        for handle in range(4)
    ]


SHARED = [name for name in (*DENSE, *MIXTURES, *OTHERS) if name != "step3p5"]


@pytest.mark.parametrize("name", cases(SHARED))
def test_two_workers_answer_as_one(name, tmp_path):
    write(HOSTILE[name], tmp_path)
    found = []
    for num_workers in (1, 2):
        core = open_core(tmp_path, num_workers)
        found.append(serve(core, requests()))
        core.shutdown()
    assert found[0].tokens == found[1].tokens
    assert same_bits(*found) or not IS_NATIVE


def test_one_gate_for_each_head_is_refused(tmp_path):
    write(HOSTILE["step3p5"], tmp_path)
    with pytest.raises(LoadError, match="has one gate for each head"):
        open_core(tmp_path, 2)
