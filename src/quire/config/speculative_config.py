"""`speculative_config` and the short forms `spec_method`, `spec_model` and `spec_tokens`, checked.

What needs the draft's files is in `draft_facts.py`, what needs the target in
`resolve/speculation.py`.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from quire.config.args.engine_options import EngineOptions
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, UnknownParameter

_EXACT = "Answers here are those without drafts, to the bit; leave it out."
_OWN_KERNELS = "The draft uses the kernels of the target; leave it out."

REFUSED_METHODS = {
    "dflash": "Drafts of whole blocks are not built: use eagle3 or mtp.",
    "dspark": "Drafts of whole blocks are not built: use eagle3 or mtp.",
    "mlp_speculator": "Use medusa, eagle or a draft_model.",
}
"""Documented methods that are not built, and what to do instead."""

_SAME = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
"""Other names of a method."""

_METHODS = (
    *("ngram", "suffix", "auto", "custom_class", "draft_model", "eagle", "eagle3", "mtp"),
    *("medusa", "extract_hidden_states"),
)

_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "code_revision": ((None,), "Quire never runs code from a model folder; leave it out."),
    "draft_tensor_parallel_size": ((None, 1), "This release runs a model on one device."),
    "kv_cache_dtype": ((None, "auto"), "The draft's K/V have the type of the target's."),
    "attention_backend": ((None,), _OWN_KERNELS),
    "moe_backend": ((None, "auto"), _OWN_KERNELS),
    "draft_load_config": ((None, {}), "Weights of the draft are found as those of the target."),
    "rejection_sample_method": (("standard",), _EXACT),
    "synthetic_acceptance_rates": ((None,), _EXACT),
    "synthetic_acceptance_length": ((None,), _EXACT),
    "parallel_drafting": ((False,), "Drafts of one pass are not built: leave it out."),
    "use_heterogeneous_vocab": ((False,), "The draft needs the tokenizer of the target."),
    "use_local_argmax_reduction": ((False,), "A draft runs on one device; leave it out."),
    "disable_padded_drafter_batch": ((False, True), ""),
    "disable_eagle_block_drop": ((False, True), ""),
    "enable_adaptive_verification": (
        (False,),
        "The number of drafts follows from what was accepted already; leave it out.",
    ),
    "dspark_draft_topk": ((None,), REFUSED_METHODS["dspark"]),
    "index_share_for_mtp_iteration": ((None, False), "Each pass has an index of its own."),
}
"""Keys of the reference that change nothing here, at the values that are taken. Neither is a batch
padded for the draft nor a block dropped, so that the two `disable_` keys have nothing to disable.
"""


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `speculative_config` that have an effect; None: decided later."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    max_model_len: int | None = None
    revision: str | None = None
    quantization: str | None = None
    enforce_eager: bool | None = None
    draft_sample_method: str | None = None
    draft_model_config: dict[str, Any] | None = None


_LONGEST_LOOKUP = 32
"""Longest stretches in the index of a prompt: at 32 it takes some 6 kB and 15 us a token."""
_DEEPEST_TRIE = 128
"""A text that repeats itself takes as many steps for each token; no draft is longer."""

_NGRAM, _SUFFIX = ("ngram", "auto"), ("suffix", "auto")
_LAYERED = ("draft_model", "eagle", "eagle3", "mtp")
_METHODS_OF = {
    "prompt_lookup_min": _NGRAM,
    "prompt_lookup_max": _NGRAM,
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
    "max_model_len": _LAYERED,
    "quantization": _LAYERED,
    "revision": (*_LAYERED, "medusa"),
    "draft_sample_method": (*_LAYERED, "medusa"),
    "draft_model_config": ("extract_hidden_states",),
}
"""Keys that mean nothing to other methods than these."""

_SHORT_FORMS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


def speculative_config(args: EngineOptions) -> SpeculativeConfig | None:
    """Read what the arguments say about drafts; None: nothing is drafted.

    The method is one that is built, or None where the draft's files tell it. Raises
    InvalidParameter, InvalidType, UnknownParameter or NotBuiltYet, naming the key.
    """
    given = _given(args)
    if not given:
        return None
    for key, (neutral, hint) in _NEUTRAL.items():
        value = given.pop(key, neutral[0])
        # types are compared too: True equals 1, but it is not a number of ranks
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise NotBuiltYet(_named(key), value, hint)
    config = _converted(given)
    config = msgspec.structs.replace(config, method=_method(config))
    _check_counts(config)
    _check_suffix(config)
    _check_batches(config)
    if config.draft_sample_method not in (None, "greedy", "probabilistic"):
        name = _named("draft_sample_method")
        raise InvalidParameter(name, config.draft_sample_method, "greedy or probabilistic")
    if config.method is not None:
        check_keys(config)
    return config


def check_keys(config: SpeculativeConfig) -> None:
    """Raise InvalidParameter for a key that would not have an effect with the method."""
    defaults = SpeculativeConfig()
    for key, methods in _METHODS_OF.items():
        value = getattr(config, key)
        if config.method not in methods and value != getattr(defaults, key):
            allowed = f"it goes with {', '.join(methods)}, and the method is {config.method}"
            raise InvalidParameter(_named(key), value, allowed, "Leave it out.")


def _given(args: EngineOptions) -> dict[str, Any]:
    """The keys from the dict and the short forms. `{}` is not a wish."""
    given = {}
    for key, value in (args.speculative_config or {}).items():
        # dotted flags come with dashes: --speculative-config.num-speculative-tokens
        given[key.replace("-", "_")] = value
    for name, key in _SHORT_FORMS.items():
        value = vars(args)[name]
        if value is None:
            continue
        if key in given:
            allowed = f"speculative_config has the key {key!r} already"
            raise InvalidParameter(name, value, allowed, "Give one of the two.")
        given[key] = value
    if "model" in given and isinstance(given["model"], os.PathLike):
        given["model"] = os.fspath(given["model"])
    return given


def _converted(given: dict[str, Any]) -> SpeculativeConfig:
    if "tensor_parallel_size" in given:
        hint = "The key is draft_tensor_parallel_size."
        raise UnknownParameter(_named("tensor_parallel_size"), "it is not a key of drafts", hint)
    for key, value in given.items():
        if key not in SpeculativeConfig.__struct_fields__:
            known = ", ".join(sorted([*SpeculativeConfig.__struct_fields__, *_NEUTRAL]))
            raise UnknownParameter(_named(key), f"the keys are {known}")
        try:
            # one key at a time, so that the error names it
            msgspec.convert({key: value}, SpeculativeConfig)
        except msgspec.ValidationError as error:
            allowed = str(error).partition(" - at")[0]
            raise InvalidType(_named(key), value, allowed[:1].lower() + allowed[1:]) from None
    return msgspec.convert(given, SpeculativeConfig)


def _method(config: SpeculativeConfig) -> str | None:
    """The method that is named, or that follows from the name of the model."""
    method, model = config.method, config.model
    if method is None:
        if model == "ngram" or model in _SAME:
            return "ngram"
        if model is not None and _is_class(model):
            return "custom_class"
        if model is None:
            hint = 'As in {"method": "ngram", "num_speculative_tokens": 4}.'
            raise InvalidParameter(_named("method"), None, "a method or a model is given", hint)
        return None
    if method in REFUSED_METHODS:
        raise NotBuiltYet(_named("method"), method, REFUSED_METHODS[method])
    method = _SAME.get(method, method)
    # the reference has a name for each family, and the model's files say the family here
    if method.endswith("_mtp"):
        method = "mtp"
    if method not in _METHODS:
        raise InvalidParameter(_named("method"), method, "one of " + ", ".join(_METHODS))
    if method == "custom_class" and (model is None or not _is_class(model)):
        allowed = "the path of the class, as package.module.Class, for method custom_class"
        raise InvalidParameter(_named("model"), model, allowed)
    if method in ("draft_model", "eagle", "eagle3", "medusa") and model is None:
        allowed = f"the folder or hub id of the draft, for method {method}"
        raise InvalidParameter(_named("model"), None, allowed)
    return method


def _is_class(model: str) -> bool:
    """Whether the text is a path of a class, not one of files."""
    parts = model.split(".")
    is_path = len(parts) > 1 and all(part.isidentifier() for part in parts)
    # a folder may be called a.b too
    return is_path and not os.path.exists(model)


def _check_counts(config: SpeculativeConfig) -> None:
    for key in (
        "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "max_model_len",
    ):  # fmt: skip
        value = getattr(config, key)
        if value is not None and value < 1:
            raise InvalidParameter(_named(key), value, "at least 1")
        if value is not None and key.startswith("prompt_lookup") and value > _LONGEST_LOOKUP:
            hint = "What has followed so many tokens has followed the last few of them, too."
            raise InvalidParameter(_named(key), value, f"at most {_LONGEST_LOOKUP}", hint)
    if config.method == "extract_hidden_states" and config.num_speculative_tokens not in (None, 1):
        allowed = "1, for method extract_hidden_states, which drafts nothing"
        raise InvalidParameter(
            _named("num_speculative_tokens"), config.num_speculative_tokens, allowed
        )
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        allowed = f"at most prompt_lookup_max={high}"
        raise InvalidParameter(_named("prompt_lookup_min"), low, allowed)


def _check_suffix(config: SpeculativeConfig) -> None:
    bounds = {
        "suffix_decoding_max_tree_depth": (1, _DEEPEST_TRIE),
        "suffix_decoding_max_cached_requests": (0, None),
        "suffix_decoding_max_spec_factor": (0, None),
        "suffix_decoding_min_token_prob": (0, 1),
    }
    for key, (low, high) in bounds.items():
        value = getattr(config, key)
        if not low <= value <= (value if high is None else high):
            allowed = f"at least {low}" + ("" if high is None else f" and at most {high}")
            raise InvalidParameter(_named(key), value, allowed)


def _check_batches(config: SpeculativeConfig) -> None:
    """Ranges begin at 1, ascend and do not overlap."""
    name = _named("num_speculative_tokens_per_batch_size")
    given, end = config.num_speculative_tokens_per_batch_size, 0
    allowed = "a list of (first, last, k), ascending from 1 without overlap, with k >= 0"
    if given == []:
        raise InvalidParameter(name, given, allowed)
    for first, last, count in given or ():
        if (end == 0 and first != 1) or first <= end or last < first or count < 0:
            raise InvalidParameter(name, given, allowed)
        end = last


def _named(key: str) -> str:
    return f"speculative_config[{key!r}]"
