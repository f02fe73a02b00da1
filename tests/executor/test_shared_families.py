"""Families over several workers: the bits of one, whatever the workers share of them."""

import numpy as np
import pytest

from quire import SamplingParams
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import LoadError
from quire.hardware.native import find_native
from quire.models import read_spec
from quire.models.cutting.sharding import has_bits_of_one, kept_whole, shard
from quire.models.layer_memory import RecurrentState
from tests.executor.worker_cores import open_core, same_bits, serve
from tests.models.hostile.mixtures import MIXTURES
from tests.models.hostile.models import DENSE, HOSTILE, config_of, write

IS_NATIVE = find_native()[0] is not None
STATES = ("qwen3_next", "bailing_hybrid", "mamba2", "lfm2", "recurrent_gemma", "falcon_h1")
"""Models with a recurrent state that workers share by heads, groups or channels."""
OTHERS = ("gpt_oss", "olmo2", "gemma3n", "gemma4", "deepseek_v3", "kimi_linear", "step3p5", *STATES)
"""Experts, norms of whole rows, gates of the largest, keys and values of other layers, latents,
what no worker has a part of, gates of heads.
"""
BLOCKS = {"num_gpu_blocks_override": 150}
"""One kind of attention to chosen blocks has larger ones, of which 60 hold no request."""
OFTEN = {*DENSE, *MIXTURES, *OTHERS}


def some(names, often):
    """These as parameters, those that are not among `often` with `--full` only."""
    return [pytest.param(n, marks=[] if n in often else [pytest.mark.full]) for n in names]


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


@pytest.mark.parametrize("name", some(HOSTILE, {n for n in OFTEN if HOSTILE[n].is_default}))
def test_two_workers_answer_as_one(name, tmp_path):
    """Whatever they share: heads, widths, channels, experts; or nothing of a part."""
    write(HOSTILE[name], tmp_path)
    found = []
    for num_workers in (1, 2):
        core = open_core(tmp_path, num_workers, **BLOCKS)
        found.append(serve(core, requests()))
        core.shutdown()
    assert found[0].tokens == found[1].tokens
    assert same_bits(*found) or not IS_NATIVE


@pytest.mark.parametrize("name", some(HOSTILE, {"cohere"}))
def test_four_workers_answer_as_one(name, tmp_path):
    write(HOSTILE[name], tmp_path)
    spec = read_spec(config_of(HOSTILE[name]))
    try:
        core = open_core(tmp_path, 4, **BLOCKS)
    except LoadError as error:
        assert "6 heads, which 4 workers cannot share equally" in str(error)
        return
    four = serve(core, requests())
    core.shutdown()
    core = open_core(tmp_path, 1, **BLOCKS)
    one = serve(core, requests())
    core.shutdown()
    assert four.tokens == one.tokens
    assert same_bits(four, one) or not (IS_NATIVE and has_bits_of_one(spec, 4))


@pytest.mark.parametrize("name", STATES)
def test_states_are_shared(name):
    """Each of two workers has half of the numbers of a request's state, at most a group's more."""
    spec = read_spec(config_of(HOSTILE[name]))
    own = shard(spec, 2)
    assert kept_whole(spec, 2) == {}
    for one, other in zip(own.memories, spec.memories, strict=True):
        if isinstance(one, RecurrentState):
            assert one.wide_numbers == other.wide_numbers // 2 and one.numbers < other.numbers


def test_parts_that_are_not_cut_are_whole_and_named(caplog, tmp_path):
    write(HOSTILE["mamba"], tmp_path)
    with caplog.at_level("INFO", logger="quire.models.loading.weights"):
        core = open_core(tmp_path, 2)
    core.shutdown()
    assert "have a mixer of the kind Mamba: each of the 2 workers computes all" in caplog.text
