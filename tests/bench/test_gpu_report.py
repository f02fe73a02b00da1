"""What of tools/gpu_report.py needs no GPU: its refusal, arithmetic, table and JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
import time
import zipfile

import gpu_report
import pytest
import torch
from gpu import ceilings, clock, correctness, engines, kernels, lives, parts, products, told

from quire.config.args.engine_args import EngineArgs
from quire.errors import InvalidParameter
from quire.ops import select
from tests.support.op_cases import CASES


@pytest.fixture
def llama_8b():
    return ceilings.DecoderShape(32, 4096, 32, 8, 128, 14_336, 128_256)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    command = [sys.executable, gpu_report.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert "GPU" in done.stdout
    assert done.stderr == ""


def test_a_step_of_an_8b_model_on_an_h200_takes_what_the_field_publishes(llama_8b):
    """15.0 GB of weights at 4.3 TB/s; 7.9 ms for 256 requests in the middle of 128 in, 512 out."""
    h200 = ceilings.Ceilings(4.3e12, 750e12)
    assert ceilings.decode_seconds(llama_8b, h200, 1, 128) == pytest.approx(3.5e-3, rel=0.02)
    assert ceilings.decode_seconds(llama_8b, h200, 256, 384) == pytest.approx(7.9e-3, rel=0.1)
    assert llama_8b.kv_bytes_per_token == 128 * 1024


def test_the_arithmetic_of_prompts_counts_every_parameter_twice(llama_8b):
    parameters = 8.03e9 - 2 * 128_256 * 4096  # without embedding and head
    flops = ceilings.prefill_flops(llama_8b, 1, 1)
    assert flops == pytest.approx(2 * (parameters + 128_256 * 4096), rel=1e-3)
    long = ceilings.prefill_flops(llama_8b, 1, 8192)
    attention = 4 * 32 * 32 * 128 * 8192**2 / 2
    assert long == pytest.approx(2 * parameters * 8192 + attention, rel=2e-3)


def test_an_operation_is_bound_by_the_larger_of_its_two_limits():
    limits = ceilings.Ceilings(100.0, 1000.0)
    assert limits.least_seconds(50, 100) == 0.5
    assert limits.least_seconds(50, 2000) == 2.0
    assert limits.share(50, 100, 2.0) == 0.25


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([], 0.0),
        ([(0, 1), (1, 2)], 1.0),
        ([(3, 4), (0, 1)], 0.5),
        ([(0, 4), (1, 2), (3, 6), (8, 10)], 0.8),
    ],
)
def test_time_in_which_the_device_is_busy_is_counted_once(intervals, share):
    assert clock.busy_share(intervals) == pytest.approx(share)


def test_short_gaps_count_as_busy_where_that_is_asked():
    intervals = [(0.0, 1.0), (2.0, 6.0), (10.0, 20.0)]
    share = clock.busy_share
    assert share(intervals, 2.0) == pytest.approx(1 - 4 / 20)
    assert share(intervals, 5.0) == 1.0


def test_the_table_and_the_json_say_the_same(tmp_path, capsys):
    report = told.Report({"device": "none"})
    report.add(told.Line("fast enough", 5.0, "ms", 6.0, is_least=False))
    report.add(told.Line("too slow", 50.0, "%", 60.0, note="why"))
    report.add(told.Line("no bound", 1.0, "s"))
    report.add(told.Line("left out", None, note="the time was over"))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5
    assert "5 ms" in printed[1] and "<= 6" in printed[1] and "ok" in printed[1]
    assert "MISSED" in printed[2] and printed[2].endswith("why")
    assert "not measured" in printed[4]
    report.write(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["facts"] == {"device": "none"}
    assert [line["verdict"] for line in found["lines"]] == ["ok", "MISSED", "", "not measured"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_part_that_fails_or_comes_too_late_is_a_line_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a double")
    arguments = ["--output", str(tmp_path / "report.json"), "--jobs", "1", "--parts", "limits"]
    run = gpu_report.Run(gpu_report.parse(arguments), tmp_path)
    assert run.report() == 1
    report = json.loads((tmp_path / "report.json").read_text())
    failed = report["lines"][0]
    assert (failed["what"], failed["verdict"]) == ("limits", "not measured")
    assert "exit status 1" in failed["note"] and "CUDA" in failed["note"]
    assert "==== limits: exit status 1" in (tmp_path / "report.log").read_text()
    late = gpu_report.Run(gpu_report.parse([*arguments, "--minutes", "0"]), tmp_path)
    assert late.report() == 1
    lines = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert "--parts limits" in lines[0]["note"]


def test_lines_cross_from_a_part_to_the_report_as_json():
    line = told.Line("fast enough", 5.0, "ms", 6.0, is_least=False, note="why")
    assert told.Line.from_json(line.as_json()) == line
    for text in ("a warning", "[1]", '{"other": 1}'):
        with pytest.raises(ValueError):
            told.Line.from_json(text)


def test_every_part_has_what_it_runs():
    tuning = pytest.importorskip("gpu.tuning")
    names = [part.name for part in (*parts.CHECKS, *parts.SPEEDS)]
    assert len(set(names)) == len(names)
    homes = {"smoke": lives, "bits": lives, "death": lives, "attention": kernels}
    homes |= dict.fromkeys(("latents", "latent_tiles"), pytest.importorskip("gpu.latents"))
    for name in {name.split(":")[0] for name in names} - {"life", "conformance", "parity", "warm"}:
        known = [homes.get(name), engines, kernels, products, ceilings, tuning]
        attributes = (name, "attentions" if name == "attention" else "table")
        assert any(hasattr(home, a) for home in known if home for a in attributes), name


def test_what_is_not_installed_comes_from_the_folder_of_wheels(monkeypatch, tmp_path):
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "quire_probe-1-py3-none-any.whl", "w") as wheel:
        info = "quire_probe-1.dist-info"
        wheel.writestr("quire_probe.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-probe\nVersion: 1\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(gpu_report, "NEEDED", ("json", "quire_probe"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert gpu_report.add_wheels(None, target) == ["quire_probe"]
    assert gpu_report.add_wheels(wheels, target) == []
    assert importlib.import_module("quire_probe")


def test_a_kernel_that_does_not_conform_is_named():
    case = next(case for case in CASES if case.op == "add" and not case.name.startswith("0"))
    plain = select(device="cpu", dtype=torch.float32, providers=["torch"])
    assert correctness.failure_of(case, torch.float32, plain, plain, "cpu") is None
    wrong = torch.nn.Identity()
    object.__setattr__(plain, "add", lambda x, delta, scale=1.0: wrong(x) + 1.01 * scale * delta)
    assert "error" in correctness.failure_of(case, torch.float32, plain, plain, "cpu")


def test_a_rounded_product_that_differs_is_named():
    plain = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])
    shape = (torch.bfloat16, correctness.FORMATS[0], 5, 96, 32, "cpu")
    assert correctness.product_error(plain, *shape) == 0
    right = plain.pack_linear
    object.__setattr__(plain, "pack_linear", lambda w, *rest: right(w * 1.05, *rest))
    assert correctness.product_error(plain, *shape) > 0.03


@pytest.mark.full
def test_families_say_what_transformers_says():
    assert correctness.other_tokens("qwen3", "cpu") is None
    assert correctness.drift("qwen3", "cpu") is None


@pytest.mark.parametrize("wrong", ["a log-probability", "a token"])
def test_a_family_that_drifts_in_bfloat16_is_told(monkeypatch, wrong):
    ours = correctness._ours

    def wrong_answers(*given):
        for answer in ours(*given):
            if wrong == "a token":
                yield dataclasses.replace(answer, token_ids=[i ^ 1 for i in answer.token_ids])
            else:
                yield dataclasses.replace(answer, chances=[x - 0.3 for x in answer.chances])

    monkeypatch.setattr(correctness, "_ours", lambda *given: list(wrong_answers(*given)))
    assert "allowed" in correctness.drift("qwen3", "cpu")


def test_providers_of_attention_stand_beside_each_other(monkeypatch):
    plain = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])

    def select_some(*, providers, **_):
        if providers == ["attend=fa3"]:
            raise InvalidParameter("providers", "attend=fa3", "the package is not installed")
        return plain

    monkeypatch.setattr(kernels, "select", select_some)
    monkeypatch.setattr(kernels, "median_seconds", lambda call: 1e-3)
    monkeypatch.setattr(kernels, "_HEAD_DIM", 8)
    lines = list(kernels.side_by_side(ceilings.Ceilings(1e12, 1e15), "cpu"))
    assert [line.what for line in lines] == [
        "kernel attend prefill 8 x 2048 of 2048, triton",
        "kernel attend prefill 8 x 512 of 8192, triton",
    ]
    assert all("the package is not installed" in line.note for line in lines)


@pytest.mark.skipif(
    "device" not in EngineArgs.__dataclass_fields__, reason="no device can be chosen yet"
)
def test_an_engine_of_a_named_shape_is_timed():
    prompts = engines.prompts_of("tiny", 3, 20)
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [20] * 3
    settings = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 4 << 20}
    with engines.engine("tiny", device="cpu", **settings) as llm:
        assert engines.generate_seconds(llm, prompts, 8, is_greedy=False) > 0
        rate, _ = engines._together(llm, "tiny", shape_of(), ceilings.Ceilings(1e9, 1e9), 3, 8)
    assert rate.value > 0


def test_a_step_is_the_time_between_the_first_token_and_the_last(llama_8b, monkeypatch):
    def generate_seconds(llm, prompts, num_tokens, *, is_greedy=True):
        return len(prompts) * (0.5 if is_greedy else 1.0) + 0.25 * (num_tokens - 1)

    monkeypatch.setattr(engines, "generate_seconds", generate_seconds)
    prompts = engines.prompts_of("tiny", 4, 20)
    assert engines.itl_seconds(None, prompts, 9) == 0.25
    assert engines.itl_seconds(None, prompts, 9, is_greedy=False) == 0.25
    limits = ceilings.Ceilings(1e9, 1e12)
    rate, share = engines._together(None, "tiny", llama_8b, limits, 4, 9)
    floor = ceilings.decode_seconds(llama_8b, limits, 4, 128 + 4)
    assert (rate.what, rate.unit) == ("TINY 4 together, 128 in / 9 out: output", "tokens/s")
    assert rate.value == 4 * 9 / (4 * 0.5 + 8 * 0.25)
    assert (share.what, share.unit) == ("TINY 4 together, 128 in / 9 out: of roofline", "%")
    assert share.value == pytest.approx(100 * floor / 0.25) and share.target == 70
    assert share.note == f"step 250.00 ms, roofline {floor * 1e3:.2f} ms"


def test_8_bit_floats_are_measured_against_a_roofline_of_half_the_bytes(llama_8b, monkeypatch):
    limits = ceilings.Ceilings(4e12, 8e14)
    asked = {}

    class Llm:
        def collective_rpc(self, method):
            return {"kv_cache_bytes": [132 * 2 * 8 * 32 * 5000]}[method]

    @contextlib.contextmanager
    def engine(shape, **settings):
        asked.update(settings)
        yield Llm()

    monkeypatch.setattr(engines, "engine", engine)
    monkeypatch.setattr(engines, "generate_seconds", lambda llm, prompts, count: 2.0)
    monkeypatch.setattr(engines, "itl_seconds", lambda llm, prompts, count: 0.003)
    itl, _, together, prefill, held = engines.eight(limits)
    assert asked == {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    half = 1e3 * ceilings.decode_seconds(llama_8b, limits, 1, 192) / 2
    assert itl.value == 3 and float(itl.note.split()[1]) == pytest.approx(half, rel=0.01)
    assert together.value == 256 * 128 / 2 and held.value == pytest.approx(5000)
    assert prefill.value == 4 * 2048 / 2


def test_a_kernel_s_line_has_its_share_and_its_rates(monkeypatch):
    monkeypatch.setattr(kernels, "median_seconds", lambda call: call() is None or 1e-3)
    monkeypatch.setattr(kernels, "_FFN", 64)
    plain = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])
    decode = kernels.attention(plain, "decode", 3, 1, 40, device="cpu")
    assert decode.num_bytes == 2 * (3 * 32 * 128 * 2) + 2 * 3 * 40 * 8 * 128 * 2
    assert decode.flops == 4 * 3 * 40 * 32 * 128
    rounded = kernels.attention(plain, "decode", 3, 1, 40, kernels.FP8, device="cpu")
    assert decode.num_bytes - rounded.num_bytes == 2 * 3 * 40 * 8 * (128 * 2 - (128 + 4))
    for stored_as, size in zip(kernels.FORMATS, (2, 1, 1), strict=False):
        measured = kernels.product(plain, 2, stored_as, device="cpu")
        assert measured.flops == 2 * 2 * 64 * 4096
        assert measured.num_bytes >= size * 64 * 4096
    line = decode.line(ceilings.Ceilings(decode.num_bytes / 5e-4, 1e15), 85)
    assert (line.value, line.verdict) == (pytest.approx(50), "MISSED")
    assert "1000.0 us" in line.note


def test_products_are_measured_at_each_class_of_rows_and_with_other_tiles(monkeypatch):
    pytest.importorskip("triton")
    plain = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])
    monkeypatch.setattr(products, "select", lambda **_: plain)
    monkeypatch.setattr(kernels, "median_seconds", lambda call: call() is None or 1e-3)
    monkeypatch.setattr(products, "PROJECTIONS", {"one": (96, 64), "two": (64, 32)})
    limits = ceilings.Ceilings(1e12, 1e15)
    lines = list(products.table(limits, time.monotonic() - 1, "cpu"))
    assert len(lines) == 5 * 2 * 4
    assert lines[0].what == "kernel one linear int432 1 x 96 x 64"
    assert lines[-1].what == "kernel two linear fp8 256 x 64 x 32 fixed"


def test_latents_are_timed_and_compared_with_plain_torch(monkeypatch):
    latents = pytest.importorskip("gpu.latents")
    plain = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])
    monkeypatch.setattr(latents, "select", lambda **_: plain)
    monkeypatch.setattr(latents, "median_seconds", lambda call: call() is None or 1e-3)
    shape = (3, 24, 8)
    work = {"decode": (shape, 2, 1, 64), "prefill": (shape, 2, 64, 64)}
    monkeypatch.setattr(latents, "WORK", work)
    monkeypatch.setattr(latents, "HEADS", ((3, 16, 24), (3, 24, 16)))
    limits = ceilings.Ceilings(1e12, 1e15)
    lines = list(latents.table(limits, "cpu"))
    names = [line.what.removeprefix("kernel ") for line in lines]
    assert names[:4] == [
        *("latent_attend decode", "latent_attend prefill"),
        *("latent_attend decode, fixed", "latent_attend prefill, fixed"),
    ]
    assert len(names) == 4 + 3 * 2
    assert all(float(line.note.split("error ")[1]) < 0.02 for line in lines[:4])
    right = plain.latent_attend
    object.__setattr__(plain, "latent_attend", lambda q, *rest: right(1.5 * q, *rest))
    wrong = next(latents.table(limits, "cpu"))
    assert float(wrong.note.split("error ")[1]) > 0.02


def test_another_tile_that_is_faster_misses_the_bound_and_one_that_fails_is_named():
    product_tiles = pytest.importorskip("quire.kernels.triton.linear.product_tiles")
    shape = product_tiles.ProductShape(outputs=4096, bits=4, x_bytes=2, unit=128)
    chosen = products.kernels.tile_of

    def measure():
        tile = products.kernels.tile_of(16, shape)
        if tile.warps > chosen(16, shape).warps:
            raise RuntimeError("out of resources")
        return products.Measured("product", 1e-6 * tile.outputs, 0, 0)

    line = products.compared(measure)
    assert products.kernels.tile_of is chosen
    assert line.value == pytest.approx(100) and line.verdict == "MISSED"
    assert line.note.startswith("32.0 us; half the outputs 16.0 us")
    assert "twice the warps does not run" in line.note


def shape_of():
    config = engines.config_of("tiny")
    return ceilings.DecoderShape.of(config)
