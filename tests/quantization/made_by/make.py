"""Writes the checkpoints in this folder with the packages that they are of, and next to each the
logits of the package's own dequantised weights. Needs torch, transformers and the package; run as

    python tests/quantization/made_by/make.py torchao hqq quark modelopt
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
PROMPT = [1, 5, 3, 7, 2, 9, 4, 11, 6, 13]


def base_model() -> LlamaForCausalLM:
    """A model whose numbers are large enough for differences to show."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    # weights off the middle, so that zero points count
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data += 0.05
    return model


def saved_base() -> str:
    folder = tempfile.mkdtemp()
    base_model().save_pretrained(folder)
    return folder


def finish(name: str, folder: str, weights: dict[str, torch.Tensor]) -> None:
    """Keep a checkpoint, with the logits of `weights`, which are those of its linear modules."""
    plain = base_model().float()
    missing = plain.load_state_dict(
        {k: v.detach().float() for k, v in weights.items()}, strict=False
    )
    assert not missing.unexpected_keys, missing.unexpected_keys
    with torch.no_grad():
        logits = plain(torch.tensor([PROMPT])).logits[0]
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in Path(folder).iterdir():
        if file.name in ("config.json", "model.safetensors", "hf_quant_config.json"):
            shutil.copy(file, target / file.name)
    expected = {"prompt": PROMPT, "logits": [[round(float(v), 6) for v in row] for row in logits]}
    (target / "expected.json").write_text(json.dumps(expected))
    print("made", name, flush=True)


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            yield name, module


def torchao() -> Iterator[tuple[str, Callable[[], None]]]:
    import torchao.quantization as q
    from transformers import TorchAoConfig

    configs: dict[str, Callable[[], Any]] = {
        "int8": lambda: q.Int8WeightOnlyConfig(),
        "int8_group": lambda: q.Int8WeightOnlyConfig(granularity=q.PerGroup(32)),
        "int8_rows": lambda: q.Int8DynamicActivationInt8WeightConfig(),
        "fp8": lambda: q.Float8WeightOnlyConfig(),
        "fp8_rows": lambda: q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerRow()),
        "fp8_tensor": lambda: q.Float8DynamicActivationFloat8WeightConfig(
            granularity=q.PerTensor()
        ),
        "intx4": lambda: q.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,
            granularity=q.PerGroup(32),
            mapping_type=q.MappingType.ASYMMETRIC,
        ),
        "intx4_rows": lambda: q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        "mixed": lambda: q.FqnToConfig(
            {
                "model.layers.0.self_attn.q_proj": q.Int8WeightOnlyConfig(),
                "re:.*down_proj": None,
                "re:model.layers.*mlp.*": q.IntxWeightOnlyConfig(
                    weight_dtype=torch.int4, granularity=q.PerGroup(16)
                ),
                "_default": q.Float8WeightOnlyConfig(),
            }
        ),
    }

    def one(name: str, make: Callable[[], Any]) -> None:
        how = TorchAoConfig(make())
        model = LlamaForCausalLM.from_pretrained(
            saved_base(), dtype=torch.float32, quantization_config=how
        )
        folder = tempfile.mkdtemp()
        model.save_pretrained(folder)
        weights = {}
        for module, linear in linears(model):
            w = linear.weight
            weights[module + ".weight"] = w.dequantize() if hasattr(w, "qdata") else w
        finish(f"torchao-{name}", folder, weights)

    for name, make in configs.items():
        yield name, lambda name=name, make=make: one(name, make)
    yield "int4", torchao_int4


def torchao_int4() -> None:
    """Int4WeightOnlyConfig needs a GPU, so that torchao's parts of it make its tensors."""
    import torchao.quantization as q
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.utils import (
        get_groupwise_affine_qparams,
        groupwise_affine_dequantize_tensor_from_qparams,
        groupwise_affine_quantize_tensor_from_qparams,
    )
    from transformers import TorchAoConfig

    model, weights, group = base_model(), {}, 32
    state = dict(model.state_dict())
    for name, module in linears(model):
        if name == "lm_head":
            continue
        w = module.weight.data.to(torch.bfloat16)
        scales, zeros = get_groupwise_affine_qparams(w, 4, group, dtype=torch.bfloat16)
        packed = groupwise_affine_quantize_tensor_from_qparams(w, scales, zeros, 4, group)
        if packed.dtype == torch.uint8 and packed.shape[1] * 2 == w.shape[1]:
            codes = torch.stack((packed >> 4, packed & 15), 2).flatten(1)
        else:
            codes = packed
        weights[name + ".weight"] = groupwise_affine_dequantize_tensor_from_qparams(
            codes.to(torch.int32), scales.float(), zeros.float(), 4, group
        )
        signed = codes.to(torch.int8) - 8
        both = (signed[:, 1::2] << 4) | (signed[:, ::2] & 15)  # pack_int4 of torchao
        state[name + ".weight"] = q.Int4Tensor(
            qdata=both.contiguous(),
            scale=scales.t().contiguous(),
            zero_point=zeros.t().contiguous(),
            block_size=[1, group],
            shape=w.shape,
        )
    tensors, metadata = flatten_tensor_state_dict(state)
    folder = tempfile.mkdtemp()
    config = copy.deepcopy(model.config)
    config.architectures = ["LlamaForCausalLM"]
    config.quantization_config = TorchAoConfig(q.Int4WeightOnlyConfig(group_size=group)).to_dict()
    config.save_pretrained(folder)
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        folder + "/model.safetensors",
        metadata | {"format": "pt"},
    )
    finish("torchao-int4", folder, weights)


def hqq() -> Iterator[tuple[str, Callable[[], None]]]:
    def one(name: str, **keys: Any) -> None:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
        from safetensors.torch import save_file

        model, weights, state = base_model(), {}, {}
        quant = BaseQuantizeConfig(**keys)
        kept = dict(model.state_dict())
        for module, linear in linears(model):
            if module == "lm_head":
                continue
            made = HQQLinear(
                copy.deepcopy(linear),
                copy.deepcopy(quant),
                compute_dtype=torch.float32,
                device="cpu",
            )
            weights[module + ".weight"] = made.dequantize()
            kept.pop(module + ".weight")
            state |= {f"{module}.{key}": value for key, value in made.state_dict().items()}
        folder = tempfile.mkdtemp()
        config = copy.deepcopy(model.config)
        config.architectures = ["LlamaForCausalLM"]
        config.quantization_config = {
            "quant_config": quant,
            "quant_method": "hqq",
            "skip_modules": ["lm_head"],
        }
        config.save_pretrained(folder)
        tensors = {k: v.contiguous() for k, v in (kept | state).items()}
        save_file(tensors, folder + "/model.safetensors", {"format": "pt"})
        finish(f"hqq-{name}", folder, weights)

    yield "4bit", lambda: one("4bit", nbits=4, group_size=32, axis=1)
    yield "8bit", lambda: one("8bit", nbits=8, group_size=64, axis=1)
    yield "3bit", lambda: one("3bit", nbits=3, group_size=32, axis=1)
    yield "2bit", lambda: one("2bit", nbits=2, group_size=16, axis=1)
    yield "4bit_axis0", lambda: one("4bit_axis0", nbits=4, group_size=32, axis=0)


def quark() -> Iterator[tuple[str, Callable[[], None]]]:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as c

    def one(name: str, layer: Any, pack_method: str = "reorder", **keys: Any) -> None:
        model = LlamaForCausalLM.from_pretrained(saved_base(), dtype=torch.float32)
        how = c.QConfig(global_quant_config=layer, exclude=["lm_head"], **keys)
        data = [torch.tensor([PROMPT])]
        quantizer = ModelQuantizer(how)
        model = quantizer.quantize_model(model, data)
        model = quantizer.freeze(model)
        folder = tempfile.mkdtemp()
        weights = {}
        for module, linear in linears(model):
            w = linear.weight
            q = getattr(linear, "_weight_quantizer", None)
            weights[module + ".weight"] = w if q is None else q(w)
        with torch.no_grad():
            export_safetensors(model, folder, pack_method=pack_method)
        finish(f"quark-{name}", folder, weights)

    def group(dtype: Any, symmetric: bool) -> Any:
        spec = dtype(
            symmetric=symmetric,
            scale_type="float",
            round_method="half_even",
            is_dynamic=False,
            ch_axis=-1,
            group_size=32,
        )
        return c.QLayerConfig(weight=spec.to_quantization_spec())

    def pair(weight: Any, rows: Any) -> Any:
        return c.QLayerConfig(
            weight=weight.to_quantization_spec(), input_tensors=rows.to_quantization_spec()
        )

    whole = {"symmetric": True, "scale_type": "float", "round_method": "half_even"}
    static = {"observer_method": "min_max", "is_dynamic": False}
    layers: dict[str, Callable[[], Any]] = {
        "fp8": lambda: pair(c.FP8E4M3PerTensorSpec(**static), c.FP8E4M3PerTensorSpec(**static)),
        "fp8_channel": lambda: pair(
            c.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
            c.FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1),
        ),
        "int8": lambda: pair(
            c.Int8PerChannelSpec(**whole, is_dynamic=False, ch_axis=0),
            c.Int8PerTensorSpec(**whole, **static),
        ),
        "mxfp4": lambda: pair(
            c.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
            c.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True),
        ),
        "int4": lambda: group(c.Int4PerGroupSpec, True),
        "uint4": lambda: group(c.Uint4PerGroupSpec, False),
    }
    for name, make in layers.items():
        yield name, lambda name=name, make=make: one(name, make())
    yield "uint4_order", lambda: one("uint4_order", layers["uint4"](), "order")
    yield (
        "mixed",
        lambda: one(
            "mixed",
            layers["fp8"](),
            layer_quant_config={
                "*down_proj": layers["mxfp4"](),
                "*self_attn.o_proj": layers["fp8_channel"](),
            },
        ),
    )


def modelopt() -> Iterator[tuple[str, Callable[[], None]]]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def one(name: str, how: Any) -> None:
        model = LlamaForCausalLM.from_pretrained(saved_base(), dtype=torch.float32)
        loop = lambda m: m(torch.tensor([PROMPT]))  # noqa: E731
        model = mtq.quantize(model, how, loop)
        weights = {n + ".weight": m.weight_quantizer(m.weight) for n, m in linears(model)}
        folder = tempfile.mkdtemp()
        with torch.no_grad():
            export_hf_checkpoint(model, export_dir=folder)
        finish(f"modelopt-{name}", folder, weights)

    def mixed() -> Any:
        """FP8 in the attention, with a scale per output and token in the feed-forward part."""
        how = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
        for entry in copy.deepcopy(mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG)["quant_cfg"]:
            if entry.get("quantizer_name") in ("*weight_quantizer", "*input_quantizer"):
                entry["quantizer_name"] = "*mlp" + entry["quantizer_name"]
                how["quant_cfg"].append(entry)
        how["quant_cfg"].append({"quantizer_name": "*o_proj*", "enable": False})
        return how

    yield "fp8", lambda: one("fp8", mtq.FP8_DEFAULT_CFG)
    yield "mixed", lambda: one("mixed", mixed())


if __name__ == "__main__":
    for part in sys.argv[1:]:
        try:
            made = list(globals()[part]())
        except Exception:
            traceback.print_exc()
            continue
        for name, make in made:
            try:
                make()
            except Exception:
                print("FAILED", part, name, traceback.format_exc()[-1500:], flush=True)
