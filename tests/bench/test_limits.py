"""The formulas of the limit, and the loops that measure the machine_limits."""

import json

import pytest
import torch

from quire.bench import machine_limits, report, workload_limits
from quire.config.args.engine_args import EngineArgs
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.models import read_spec
from quire.models.costs import flops_per_token
from quire.models.layer_memory import NumberBytes
from quire.testing import make_checkpoint
from quire.testing.model_shapes import make_config
from tests.quantization.bitsandbytes_checkpoints import BLOCK_FORMATS, PEAK_FORMATS
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS
from tests.quantization.four_bit_checkpoints import FOUR_BIT_FORMATS

QWEN = read_spec(make_config("0.6b", "qwen3"))
KV = NumberBytes(2, 2)
BF16 = workload_limits.Store(2, 2, KV)
NATIVE, WHY = find_native()


def test_arithmetic_of_the_published_shape():
    """performance.md counts 0.88 GFLOP for a prompt token and 1.19 for an output token."""
    assert flops_per_token(QWEN) / 1e9 == pytest.approx(1.19, abs=0.01)
    body = workload_limits.prefill_flops(QWEN, 128) - 2 * QWEN.vocab * QWEN.dim
    attention = 128 * 4 * 16 * 128 * 64 * 28
    assert (body - attention) / 128 / 1e9 == pytest.approx(0.88, abs=0.01)
    assert workload_limits.step_bytes(QWEN, 1, 0, BF16) / 1e9 == pytest.approx(1.19, abs=0.01)


def test_limit_is_bandwidth_for_one_row_and_arithmetic_for_many():
    one = workload_limits.Workload(1, 1, 11, 256)
    seconds = workload_limits.least_seconds(
        QWEN, one, BF16, read_bytes_per_s=40e9, flops_per_s=1e15
    )
    assert seconds == pytest.approx(11 * 1.19 / 40, rel=0.01)  # the first token reads them too
    many = workload_limits.Workload(64, 1, 11, 256)
    seconds = workload_limits.least_seconds(
        QWEN, many, BF16, read_bytes_per_s=1e15, flops_per_s=1e12
    )
    assert seconds == pytest.approx(64 * (0.88 + 0.31 + 10 * 1.19) / 1000, rel=0.02)


def test_parts_add_up_to_the_whole():
    work = workload_limits.Workload(8, 128, 64, 8)
    parts = [
        part(QWEN, work, BF16, 20e9, 2e11)
        for part in (
            workload_limits.prefill_seconds,
            workload_limits.decode_seconds,
            workload_limits.least_seconds,
        )
    ]
    assert parts[0] + parts[1] == pytest.approx(parts[2]) and min(parts) > 0


def test_more_waves_take_more_reads():
    def seconds(max_num_seqs):
        work = workload_limits.Workload(32, 8, 8, max_num_seqs)
        return workload_limits.least_seconds(QWEN, work, BF16, 40e9, 1e15)

    assert seconds(8) == pytest.approx(4 * seconds(32), rel=0.05)


def test_keys_behind_a_window_are_not_read():
    whole = read_spec(make_config("tiny", "llama"))
    windowed = read_spec(make_config({"sliding_window": 10}, "mistral"))
    kv = 2 * 2 * 32 * 4 * 2  # keys and values, heads, their width, layers, bytes
    for decoder, seen in ((whole, 100), (windowed, 10)):
        with_kv, without = (workload_limits.step_bytes(decoder, 3, n, BF16) for n in (100, 0))
        assert with_kv - without == 3 * seen * kv


def test_rounded_weights_count_their_bytes(tmp_path):
    folder = str(make_checkpoint(tmp_path / "m"))

    def store(**wishes):
        plan = EngineArgs(model=folder, dtype="bfloat16", **wishes).create_engine_config()
        return workload_limits.store_of(plan)

    assert store() == workload_limits.Store(2, 2, KV)
    assert store(quantization="int8") == workload_limits.Store(1, 1, KV)
    assert store(quantization="int4") == workload_limits.Store(4.5 / 8, 1, KV)
    assert store(kv_cache_dtype="int8").kv == NumberBytes(2, 1, 4)


@pytest.mark.parametrize(
    ("name", "coded", "head"),
    [
        ("compressed-w4a16", 0.5 + 2 / 16, 2),  # scales of two bytes
        ("awq", 0.5 + 3 / 16, 2),  # and zero points
        ("fp8-blocks", 1 + 4 * 3 / 64, 2),
        ("compressed-int", 1 + 4 / 64, 2),
        ("mxfp4", 0.5 + 2 / 32, 2),
        ("nvfp4", 0.5 + 4 / 16, 2),
        ("bitsandbytes-nf4", 0.5 + 4 / 64, 2),
        ("bitsandbytes-int8-rows", 1 + 4 / 64, 2),
    ],
)
def test_weights_in_codes_count_their_bytes(tmp_path, name, coded, head):
    folder = make_checkpoint(tmp_path / "m")
    how = (FORMATS | BYTE_FORMATS | FOUR_BIT_FORMATS | BLOCK_FORMATS | PEAK_FORMATS)[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how.config}))
    plan = EngineArgs(model=str(folder), dtype="bfloat16").create_engine_config()
    store = workload_limits.store_of(plan)
    assert store.head == head
    assert store.layers == pytest.approx(coded, rel=0.05)
    is_whole = name in ("compressed-int", "bitsandbytes-int8-rows")
    assert workload_limits.operand_of(plan) == ("int8" if is_whole else "bfloat16")


def test_few_rows_of_a_mixture_read_few_experts():
    decoder = read_spec(make_config("tiny", "mixtral"))
    per_rows = [workload_limits.step_bytes(decoder, rows, 0, BF16) for rows in (1, 4, 10_000)]
    assert per_rows == sorted(per_rows) and per_rows[0] < per_rows[1] < per_rows[2]
    everything = workload_limits.num_parameters(decoder)
    if not decoder.tie:
        everything -= decoder.vocab * decoder.dim
    assert per_rows[2] == pytest.approx(2 * everything)


@pytest.mark.parametrize("operand", ["float32", "bfloat16", "float16", "int8"])
def test_a_probe_names_its_loops_and_leaves_the_threads_alone(cache, operand):
    before = torch.get_num_threads()
    found = machine_limits.LimitProbe(operand, 2).measure()
    assert found.read_bytes_per_s > 0 and found.flops_per_s > 0
    assert found.read_by and found.flops_by and found.num_threads == 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("flops_per_s", "start_s", "largest"),
    [(5e12, 0.0, 2048), (2e11, 0.02, 2048), (5e10, 0.0, 1024), (1e9, 0.0, 256), (3e7, 0.0, 64)],
    ids=["matrix units", "slow start", "one core", "emulated", "badly emulated"],
)
def test_torch_s_products_are_measured_in_less_than_a_second(
    monkeypatch, flops_per_s, start_s, largest
):
    sizes, spent = [], []

    def product_seconds(dtype, size):
        took = 2 * size**3 / flops_per_s
        sizes.append(size)
        spent.extend([took + (start_s if size == 64 else 0.0), took, took])
        return spent[-3:]

    monkeypatch.setattr(machine_limits, "product_seconds", product_seconds)
    assert machine_limits.matrix_flops_per_s("bfloat16") == pytest.approx(flops_per_s)
    assert sizes[-1] == largest and sum(spent) < 0.5


def test_an_emulated_product_is_named(capsys):
    machine = {"num_threads": 2, "read_bytes_per_s": 4e10, "read_by": "x", "flops_per_s": 2e11,
               "flops_by": "torch's float32 product",
               "torch_flops_per_s": {"bfloat16": 6e8, "float32": 2e11}}  # fmt: skip
    report.print_share({"machine": machine, "share_of_machine_limit": 0.5})
    out = capsys.readouterr().out
    assert "200 GFLOP/s by torch's float32 product" in out
    assert "torch's bfloat16 product reaches 0.6 GFLOP/s, emulated\n" in out
    assert "torch's float32 product reaches 200 GFLOP/s\n" in out


def test_a_probe_works_without_native_code(cache, monkeypatch):
    monkeypatch.setattr(machine_limits, "find_native", lambda: (None, "not built"))
    probe = machine_limits.LimitProbe("bfloat16", 1)
    probe.evict()
    found = probe.measure()
    assert found.read_by == "torch's sum" and "product" in found.flops_by


@pytest.mark.skipif(NATIVE is None, reason=WHY)
def test_every_level_counts_the_operations_that_it_does():
    """The work of a tile is a whole number of chains and lanes, and grows with tiles and rounds."""
    for level, why in NATIVE.levels():
        if why:
            continue
        context = CpuRuntime(isa=level).context
        for operand in NATIVE.Operand.__members__.values():
            count = {
                (tiles, rounds): context.time_multiply_add(operand, tiles, rounds)[0]
                for tiles, rounds in ((1, 1), (3, 1), (3, 7))
            }
            assert count[1, 1] % 32 == 0 and count[1, 1] > 0
            assert count[3, 7] == 7 * count[3, 1] == 21 * count[1, 1]


@pytest.mark.skipif(NATIVE is None, reason=WHY)
def test_limits_are_those_of_the_instructions_that_an_engine_uses(cache, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    monkeypatch.setattr(machine_limits, "matrix_flops_per_s", lambda dtype: 1.0)
    found = machine_limits.LimitProbe("bfloat16", 1).measure()
    assert "(portable)" in found.read_by and "(portable)" in found.flops_by
