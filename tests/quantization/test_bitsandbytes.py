"""Weights of bitsandbytes against the library, blocks over the ends of rows, the config."""

import dataclasses
import logging
import math

import pytest
import torch

from quire.errors import LoadError
from quire.models.formats import read_storage
from quire.models.loading.codes.code_layouts import coded_weight
from tests.models.hostile.models import Library
from tests.quantization.bitsandbytes_checkpoints import (
    BLOCK_FORMATS,
    PEAK_FORMATS,
    TABLES,
    as_bytes,
)
from tests.quantization.coded_checkpoints import write
from tests.quantization.test_stored_codes import load, ops_of

SHAPES = ((3, 64), (5, 192), (8, 96), (40, 40), (7, 8), (300, 72))
"""Outputs and inputs: blocks of whole rows, of parts of rows, and over several of them."""


def read(how, parts, shape):
    layout = read_storage({"quantization_config": how.config}).layout_of("model.layers.0.up_proj")
    expected = layout.parts(*shape)
    for name, tensor in parts.items():
        assert expected[name].has_shape(tuple(tensor.shape)), name
    return coded_weight(layout, "up_proj", parts, shape[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_number_is_that_of_its_code_times_the_scale_of_its_block(name, shape):
    how = BLOCK_FORMATS[name]
    parts, plain = how.made(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(read(how, parts, shape).widened(), plain)


@pytest.mark.parametrize("name", PEAK_FORMATS)
def test_the_largest_number_of_an_output_is_its_scale(name):
    how = PEAK_FORMATS[name]
    parts, plain = how.made(torch.randn(9, 40, generator=torch.Generator().manual_seed(1)))
    weight = read(how, parts, (9, 40))
    torch.testing.assert_close(weight.widened(), plain, rtol=1e-6, atol=0)
    assert weight.is_of_integers == (not how.is_exact)


def widened_by(library, codes, state):
    """As one row: in several its kernel for CPUs (0.50.2) mistakes blocks that run over the end of
    a row, and is then farther from the rounded weight than any rounding can be.
    """
    shape, state.shape = state.shape, (math.prod(state.shape),)
    return library.dequantize_4bit(codes, state).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_weights_of_the_library_are_read_and_ours_by_the_library(name, shape):
    library = pytest.importorskip("bitsandbytes.functional")
    how = BLOCK_FORMATS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codes, state = library.quantize_4bit(
        weight, quant_type=how.kind, compress_statistics=how.is_nested, blocksize=64
    )
    packed = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    found = read(how, {"weight": codes, **packed}, shape)
    expected = widened_by(library, codes, state)
    torch.testing.assert_close(found.widened(), expected, rtol=1e-6, atol=1e-7)
    assert found.table == pytest.approx(TABLES[how.kind], rel=1e-6)
    parts, plain = how.made(weight)
    named = {name.removeprefix("weight."): part for name, part in parts.items()}
    bytes_of_ours = named.pop("weight")
    theirs = library.QuantState.from_dict(named, torch.device("cpu"))
    same = widened_by(library, bytes_of_ours, theirs)
    torch.testing.assert_close(same, plain, rtol=1e-6, atol=1e-7)


def test_bytes_of_the_library_are_read():
    library = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    codes, peaks, _ = library.int8_vectorwise_quant(weight)
    found = read(PEAK_FORMATS["bitsandbytes-int8"], {"weight": codes, "SCB": peaks}, (9, 40))
    expected = library.int8_vectorwise_dequant(codes, peaks)
    torch.testing.assert_close(found.widened(), expected, rtol=1e-6, atol=0)


def test_modules_on_the_list_are_stored_as_they_are():
    kept = ["lm_head", "model.layers.1", "mlp.gate"]
    config = BLOCK_FORMATS["bitsandbytes-nf4"].config | {"llm_int8_skip_modules": kept}
    storage = read_storage({"quantization_config": config})
    for module in ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate"):
        assert storage.layout_of(module) is None
    for module in ("model.layers.10.self_attn.q_proj", "model.layers.0.mlp.gate_proj"):
        assert storage.layout_of(module) is not None


STATES = {
    "blocks": ({"blocksize": 128}, "blocksize=128 is not implemented; supported: 64"),
    "shape": ({"shape": [40, 8]}, r"shape=\[40, 8\] .*supported: \[8, 40\]"),
    "table": ({"quant_type": "fp4"}, "quant_type='fp4'"),
    "nested": ({"nested_blocksize": 256}, "nested_blocksize=256"),
    "unknown": ({"wish": 1}, "describes no blocks: .*wish"),
    "type": ({"blocksize": "64"}, "describes no blocks: .*blocksize"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_other_blocks_is_refused_by_its_key(case):
    keys, says = STATES[case]
    how = BLOCK_FORMATS["bitsandbytes-nf4"]
    parts, _ = how.made(torch.ones(8, 40))
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [8, 40]}
    parts["weight.quant_state.bitsandbytes__nf4"] = as_bytes(state | keys)
    with pytest.raises(LoadError, match=rf"up_proj\.weight\.quant_state\.\w+: {says}|{says}"):
        read(how, parts, (8, 40))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 2000, b"1" * 20_000])
def test_bytes_that_are_not_a_state_are_one_clear_error(text):
    how = BLOCK_FORMATS["bitsandbytes-nf4"]
    parts, _ = how.made(torch.ones(8, 40))
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(LoadError, match="describes no blocks"):
        read(how, parts, (8, 40))


def test_rows_that_share_blocks_unevenly_are_refused():
    how = BLOCK_FORMATS["bitsandbytes-nf4"]
    parts, _ = how.made(torch.ones(16, 12))
    with pytest.raises(LoadError, match="12 inputs, .* every 64 weights"):
        read(how, parts, (16, 12))


@pytest.mark.parametrize(("threshold", "says"), [(6.0, True), (0.0, False)])
def test_activations_that_the_format_would_round_are_told_of(tmp_path, caplog, threshold, says):
    how = dataclasses.replace(PEAK_FORMATS["bitsandbytes-int8"], threshold=threshold)
    made = Library(tmp_path / "plain")["llama"]
    write(made.folder, tmp_path / "model", how)
    with caplog.at_level(logging.WARNING, logger="quire"):
        load(tmp_path / "model", ops_of("torch"), made.max_model_len)
    assert ("rounds activations to 8 bits but for outliers" in caplog.text) == says
