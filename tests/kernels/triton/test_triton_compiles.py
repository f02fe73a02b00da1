"""Every Triton kernel compiles for a GPU, and for no number that a step decides a second time.

The interpreter runs Python; much of what it runs the compiler refuses. For the compiler no GPU is
needed, so this is how a machine without one knows that the kernels start.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import quire

KERNELS = Path(quire.__file__).parent / "kernels" / "triton"
NAMES = sorted(
    name
    for path in KERNELS.rglob("*.py")
    for name in re.findall(r"def (\w+_kernel)\(", path.read_text())
)

FEW_SPILLED = 128
"""Bytes of a thread that do little harm."""
SPILLED_BY_LATENTS = 256
"""Of a loop that takes a microsecond. Triton 3.6 spills nothing, 3.9 has more registers for places
in shared memory."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on Hopper."""

WITH_FP8 = (
    *("_attend_kernel", "product_kernel", "coded_product_kernel", "_rope_store_kernel"),
    "_rounded_rows_kernel",
)
NAMES += [f"{name} fp8" for name in WITH_FP8]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, run_triton_script):
    """What the compiler says to each kernel; it has a cache of its own, so that it does compile."""
    return run_triton_script(
        Path(__file__).with_name("triton_compiler.py"),
        interpret=False,
        timeout_s=600,
        TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")),
    )


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"triton-{name.replace(' ', '-')}")
def test_compiles_and_specialises_no_number(compiled, name):
    """That a number would be specialised fails the fixture and names the argument."""
    assert name in compiled["kernels"], "no case launches this kernel"
    assert compiled["kernels"][name]["failure"] is None


def test_every_kernel_is_in_the_list(compiled):
    assert set(compiled["kernels"]) == set(NAMES)


def test_programs_fit_an_sm_at_the_shapes_of_real_models(compiled):
    """A tile that is too large compiles, keeps its numbers in memory and runs at a fraction of the
    speed, or does not start at all."""
    taken = compiled["models"]
    names = {name: name.split()[1] for name in taken}
    assert set(names.values()) >= {"_attend_kernel", "_latent_attend_kernel", "product_kernel"}
    most = dict.fromkeys(taken, FEW_SPILLED)
    most |= {k: SPILLED_BY_LATENTS for k, name in names.items() if name == "_latent_attend_kernel"}
    assert {name: t for name, t in taken.items() if t["stack"] > most[name]} == {}
    assert {name: t for name, t in taken.items() if t["shared"] > SHARED_MEMORY} == {}


BYTES_IN_FLIGHT = 3.0e6
"""What must be on its way for a Hopper GPU's memory to be busy: 4.8 TB/s times 0.65 us."""
OPERATIONS_PER_WEIGHT = {4: 4.5, 8: 5.0, 16: 4.0}
"""By the weight's bits. An SM issues 128 a clock, and its share of the bandwidth is 41, 21 and 10
weights a clock: with three times as many operations, arithmetic and not memory is the limit."""


def test_products_read_weights_as_memory_likes_it(compiled):
    """Loads that a program waits for, or of a few bytes, or too few on their way, and a product at
    small batches takes several times as long as reading its weight."""
    for name, found in compiled["products"].items():
        assert found["stack"] <= FEW_SPILLED and found["shared"] <= SHARED_MEMORY, name
        assert found["waited_loads"] == 0, name
        assert found["copied_by_16"] >= found["weight_bytes"], name
        assert found["tensor_cores"], name


def test_products_of_few_rows_keep_memory_busy(compiled):
    for name, found in compiled["products"].items():
        tile, bits = found["tile"], 4 if "int4" in name else 16 if "float" in name else 8
        if name.endswith(("x 1", "fixed")):
            ahead = (tile["STAGES"] - 1) * found["weight_bytes"] * found["programs"]
            assert ahead >= BYTES_IN_FLIGHT, name
            assert found["operations_per_weight"] <= OPERATIONS_PER_WEIGHT[bits], name
        if name.endswith("x 1"):
            assert tile["ROWS"] == 16 and found["programs"] >= 120, name


def test_products_with_codes_fit_and_load_ahead(compiled):
    """Decoded in registers, multiplied by tensor cores, and no load is waited for."""
    assert len(compiled["codes"]) == 2 * 7
    for name, found in compiled["codes"].items():
        assert found["stack"] <= FEW_SPILLED and found["shared"] <= SHARED_MEMORY, name
        assert found["waited_loads"] == 0 and found["tensor_cores"], name


def test_prompts_and_decodes_with_fixed_bits_are_one_variant(compiled):
    assert set(compiled["fixed"].values()) == {1}


def test_attention_loads_ahead(compiled):
    """That a step's numbers would have variants compiled fails the fixture. Where the loop waits
    for all copies before it multiplies, loading and computing take turns."""
    assert len(compiled["attention"]) == 4 + 4
    for name, kernels in compiled["attention"].items():
        kernel = "_attend_kernel" if "_attend_kernel" in kernels else "_latent_attend_kernel"
        decodes, prompts = kernels[f"{kernel} shared"], kernels[kernel]
        assert decodes["left_under_way"] >= 2 and prompts["left_under_way"] >= 2, name
        assert decodes["programs"] >= 1, name
        assert prompts["programs"] >= 1, name
