"""Rule 12.2: which type the weights, activations and K/V have, and whether weights are rounded."""

from __future__ import annotations

from quire.config.args.engine_options import EngineOptions
from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter, NotBuiltYet, UnsupportedConfigValue
from quire.models.formats import METHODS
from quire.models.formats.rounding_rules import (
    BITS_PER_WEIGHT,
    ONLINE,
    read_rounding_rules,
    rounding,
)
from quire.models.layer_memory import NumberBytes

_LONG_NAMES = {"half": "float16", "float": "float32"}
_NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Models whose activations leave float16's range."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

_FP8_KV = "float8_e4m3fn"
SCALED_KV = ("int8", _FP8_KV)
"""Types of K/V that have a scale for each vector: `LARGEST_NUMBER` of quire.ops.kv."""

_SCALE_BYTES = 4

_SCALED_NAMES = {
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8": _FP8_KV,
    "fp8_e4m3": _FP8_KV,
    "fp8_per_token_head": _FP8_KV,
}


def number_bytes(dtype: str, kv_dtype: str) -> NumberBytes:
    """The bytes of numbers in the memory of a model's layers."""
    if kv_dtype in SCALED_KV:
        return NumberBytes(ITEMSIZE[dtype], 1, _SCALE_BYTES)
    return NumberBytes(ITEMSIZE[dtype], ITEMSIZE[kv_dtype])


def decide_dtype(d: Decisions) -> None:
    """Fix `dtype` and `kv_dtype`."""
    if d.args.dtype == "auto":
        dtype, reason = _automatic(d)
    else:
        dtype, reason = _LONG_NAMES.get(d.args.dtype, d.args.dtype), "dtype was given"
        _check_given(d, dtype)
    d.decide("dtype", dtype, reason)
    _decide_kv_dtype(d, dtype)


def _decide_kv_dtype(d: Decisions, dtype: str) -> None:
    given = d.args.kv_cache_dtype
    if given in _SCALED_NAMES:
        if d.model.has_latents:
            hint = "Leave it out: the latent takes as much as a few heads' K/V in 8 bits."
            raise NotBuiltYet("kv_cache_dtype", f"{given} with latent attention", hint)
        stored = _SCALED_NAMES[given]
        if stored == _FP8_KV:
            require_fp8(d, "kv_cache_dtype", given)
        d.decide("kv_dtype", stored, f"kv_cache_dtype={given}: a scale per token and head")
    elif given in ("auto", dtype):
        d.decide("kv_dtype", dtype, "K/V are stored as they are computed")
    else:
        hint = f"Use 'auto', which is {dtype} here, or 'int8'."
        raise NotBuiltYet("kv_cache_dtype", f"{given} with dtype={dtype}", hint)


def asked_rounding(args: EngineOptions) -> str | None:
    """The scheme that weights are to be rounded with, by its name here; None: none was named."""
    return rounding(args.quantization)


def require_fp8(d: Decisions, name: str, given: str) -> None:
    """Raise InvalidParameter where the device has no 8-bit floats."""
    gpu = d.machine.gpu
    if d.machine.device != "cuda" or gpu is None:
        where = "this engine runs on the CPU"
    elif not gpu.has_fp8:
        where = f"{gpu.name} has {'.'.join(map(str, gpu.capability))}"
    else:
        return
    allowed = f"8-bit floats are for GPUs of compute capability 8.9 or more, and {where}"
    raise InvalidParameter(name, given, allowed, "Use 'int8', which is as small.")


STORED_NAMES = {name: name for name in METHODS} | {
    **dict.fromkeys(("auto_awq", "awq_marlin"), "awq"),
    **dict.fromkeys(("auto_gptq", "gptq_marlin"), "gptq"),
    "gpt_oss_mxfp4": "mxfp4",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
}
"""Values of `quantization` that confirm how a checkpoint is stored. fp8 rounds others."""

_WITHOUT_CODES = {
    "dummy": "Take the quantisation away with hf_overrides="
    '{"quantization_config": null, "quantization": null}.',
    "sharded_state": "Use 'auto' with the checkpoint itself: each worker reads its part of it.",
}
"""Formats of files that have no quantised weights -> what to do."""


def decide_quantization(d: Decisions) -> None:
    """Fix `quantization` and `rounding_rules`: how weights are rounded while they are loaded."""
    given, stored = d.args.quantization, d.model.stored_as
    # a name that only storage has is refused for a plain checkpoint, not ignored
    if stored is not None or given in STORED_NAMES.keys() - BITS_PER_WEIGHT.keys():
        _check_stored(d, given, stored)
        if d.args.quantization_config:
            raise InvalidParameter(
                "quantization_config",
                d.args.quantization_config,
                f"None for a checkpoint that is quantised already, here with {stored}",
                "Leave it out.",
            )
        because = d.model.widened_because
        kept = "stay as they are stored" if because is None else f"are widened at load: {because}"
        reason = f"the checkpoint is quantised with {stored}; its weights {kept}"
        d.decide("quantization", None, reason)
        d.decide("rounding_rules", None, "weights are not rounded again")
        return
    chosen = rounding(given)
    rules = read_rounding_rules(chosen, d.args.quantization_config)
    if rules is not None:
        if "fp8" in rules.schemes():
            require_fp8(d, "quantization_config", "fp8")
        d.decide("quantization", chosen or ONLINE, "quantization_config says what is rounded")
        d.decide("rounding_rules", rules, "quantization_config was given")
        return
    d.decide("rounding_rules", None, "quantization_config was not given")
    if given is not None and chosen == "fp8":
        require_fp8(d, "quantization", given)
    d.decide(
        "quantization",
        chosen,
        "quantization was not given: weights keep their values"
        if given is None
        else f"quantization was given; embedding, norms and routers stay {d.value('dtype')}",
    )


def _check_stored(d: Decisions, given: str | None, stored: str | None) -> None:
    """Raise InvalidParameter where the argument contradicts the checkpoint."""
    if given is not None and STORED_NAMES.get(given) != stored:
        found = "is not quantised" if stored is None else f"is quantised with {stored}"
        allowed = f"None or what the checkpoint's config.json says, and the checkpoint {found}"
        raise InvalidParameter("quantization", given, allowed, "Leave it out.")
    load_format = d.value("load_format")
    if load_format in _WITHOUT_CODES:
        value = f"{load_format} weights of a checkpoint that is quantised with {stored}"
        raise NotBuiltYet("load_format", value, _WITHOUT_CODES[load_format])


def weight_bytes(d: Decisions) -> int:
    """Memory of a core's weights, or where workers share its layers of one worker's share of all
    stages; those of the network that drafts included. For rounded ones an upper estimate, since a
    head that shares the embedding's table is a matrix of its own then.
    """
    drafts = d.model.drafts
    draft = 0 if drafts is None or drafts.draft is None else drafts.draft.num_parameters
    return _target_bytes(d) + draft * ITEMSIZE[d.value("dtype")]


def _target_bytes(d: Decisions) -> int:
    model, itemsize = d.model, ITEMSIZE[d.value("dtype")]
    count, size = model.num_parameters, int(d.value("tensor_parallel_size"))
    if model.stored_as is not None:
        return (count - model.num_coded_parameters) * itemsize + model.coded_bytes // size
    elsewhere = 0
    if d.value("enable_expert_parallel"):
        # of what a worker of a core alone would have
        num_workers = size * int(d.value("data_parallel_size"))
        each, own = (-(-model.num_experts // n) for n in (size, num_workers))
        elsewhere = model.num_expert_parameters * (each - own) // model.num_experts
    count -= elsewhere * size
    rounded = d.value("quantization")
    if rounded is None:
        return (count if model.rank is None else model.rank.num_parameters - elsewhere) * itemsize
    if d.value("rounding_rules") is not None:
        return (count - model.num_rounded_parameters) * itemsize + model.rounded_bytes // size
    table = model.vocab_size * model.hidden_size
    layers = (count - table) * BITS_PER_WEIGHT[rounded] / 8
    # the table stays as it is; a rounded head that had shared it is added, with at most a byte a
    # value
    return table * (itemsize + 1) + int(layers) // size


def layer_value_bytes(d: Decisions) -> float:
    """Bytes on a GPU of one value of the layers' matrices."""
    model, rounded = d.model, d.value("quantization")
    if model.num_coded_parameters:
        return model.coded_bytes / model.num_coded_parameters
    if model.num_rounded_parameters and d.value("rounding_rules") is not None:
        return ITEMSIZE[d.value("dtype")]
    return ITEMSIZE[d.value("dtype")] if rounded is None else BITS_PER_WEIGHT[rounded] / 8


def _automatic(d: Decisions) -> tuple[str, str]:
    stored = d.model.checkpoint_dtype
    if stored not in ITEMSIZE:
        raise UnsupportedConfigValue(
            f"The checkpoint is stored as {stored}, which this release cannot compute in. "
            "Pass dtype='bfloat16' or dtype='float32'."
        )
    if stored == "float32":
        return _for_float32(d)
    if stored == "float16" and d.model.model_type in _NOT_IN_FLOAT16:
        return "bfloat16", f"{d.model.model_type} leaves the range of float16"
    fast = d.machine.has_fast_bfloat16 if stored == "bfloat16" else d.machine.has_fast_float16
    if fast:
        return stored, f"the checkpoint's type, which this {_kind(d)} multiplies in hardware"
    return stored, (
        "the checkpoint's type, half the memory traffic of float32; this CPU has no instructions "
        "for it, so that dtype=float32 is faster for many tokens at once"
    )


def _for_float32(d: Decisions) -> tuple[str, str]:
    only_pools = not d.model.generates and d.model.model_type not in _NOT_IN_FLOAT16
    if only_pools and d.machine.device == "cuda":
        return "float16", (
            "float32 checkpoint of a model that only pools: a GPU is as fast in float16 as in "
            "bfloat16, and its vectors keep more digits"
        )
    if d.machine.has_fast_bfloat16:
        return (
            "bfloat16",
            f"float32 checkpoint, and this {_kind(d)} multiplies bfloat16 in hardware",
        )
    return "float32", (
        "the checkpoint's type; this CPU has no bfloat16 instructions, so that rounding would cost "
        "digits and time"
    )


def _kind(d: Decisions) -> str:
    return "GPU" if d.machine.device == "cuda" else "CPU"


def _check_given(d: Decisions, dtype: str) -> None:
    stored, model_type = d.model.checkpoint_dtype, d.model.model_type
    if dtype == "float16" and model_type in _NOT_IN_FLOAT16:
        allowed = f"activations of {model_type} leave its range"
        hint = "Use bfloat16 or float32."
        raise InvalidParameter("dtype", "float16", allowed, hint)
    if {stored, dtype} == {"float16", "bfloat16"}:
        d.note(f"dtype={dtype} converts a {stored} checkpoint; neither holds the other's values.")
