"""Checkpoints of compressed-tensors have its own logits, where the package is installed."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.paged_driver import PagedRun
from tests.quantization.test_stored_codes import PROVIDERS, TOLERANCE, by_token, load, ops_of

pytest.importorskip("compressed_tensors")

pytestmark = pytest.mark.filterwarnings("ignore")

PRESETS = (
    *("W4A16", "W4A16_ASYM", "W8A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("MXFP4A16", "NVFP4A16"),
)
"""Those of int8 activations are left out: they are simulated with another scale than they run."""
LENGTHS = (4,) * 8


@pytest.fixture(scope="module")
def model():
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, num_hidden_layers=2, vocab_size=128)
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.08 + ("norm" in name))
    return made


def bounds(weight, args):
    """The least and the largest weight of each scale."""
    if args.strategy == "tensor":
        parts = weight.view(1, -1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        parts = blocks.transpose(1, 2).flatten(2)
    else:
        parts = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return parts.amin(-1), parts.amax(-1)


def quantise(model, preset):
    """Set scales as the package finds them, the largest magnitudes without a search."""
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        least, most = bounds(module.weight.data, module.quantization_scheme.weights)
        factor = (
            generate_gparam(least.min(), most.max())
            if hasattr(module, "weight_global_scale")
            else None
        )
        scheme = module.quantization_scheme.weights
        scale, zero = calculate_qparams(least, most, scheme, global_scale=factor)
        found = {"weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": factor}
        for name, value in found.items():
            if hasattr(module, name):
                own = getattr(module, name)
                own.data = value.to(own.dtype).view(own.shape)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
        module.quantization_status = QuantizationStatus.FROZEN


@torch.no_grad()
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_logits_are_those_of_the_writer(model, tmp_path, preset, provider):
    from compressed_tensors.compressors import ModelCompressor

    theirs = copy.deepcopy(model)
    quantise(theirs, preset)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(128, (n,), generator=generator) for n in LENGTHS]
    expected = [theirs(ids[None]).logits[0] for ids in prompts]
    writer = ModelCompressor.from_pretrained_model(theirs)
    writer.compress_model(theirs)
    theirs.save_pretrained(tmp_path)
    writer.update_config(str(tmp_path))
    ops = ops_of(provider)
    ours = load(tmp_path, ops, 64)
    found = list(PagedRun(ours, prompts, ops=ops).step(list(LENGTHS)).values())
    assert by_token(found, expected).median() < TOLERANCE
