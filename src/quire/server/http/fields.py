"""The fields of a body that its type does not declare.

Clients send fields that were made for other servers. One that is null counts as left out. One that
other servers know and that cannot change what the caller gets (`HARMLESS`) is left out, named in
the response's header `HEADER` and logged once. Any other is refused, with the name that was
probably meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from quire.errors import InvalidParameter, RequestError
from quire.server.http.failures import Refusal

HEADER = b"x-ignored-fields"
CUT_HEADER = b"x-adjusted-fields"
BODY_SLOT = "quire.body"
"""Key of the decoded body in the state of a request's scope."""
IGNORED_SLOT = "quire.ignored_fields"
"""Key of the names of ignored fields in the state of a request's scope."""
CUT_SLOT = "quire.adjusted_fields"
"""Key of the name and value of what was cut to fit, in the same state."""
LOST_HEADER = b"x-not-resumable"
LOST_SLOT = "quire.not_resumable"
"""Key of what keeps a request from going on after the death of its core, in the same state."""

_INDEXED = re.compile(r"(\w+)\[([0-9]+)\]")
_MAX_SHOWN = 200
_SIMILARITY = 0.75
"""Least ratio (difflib) at which a name is taken for a misspelt one."""

Accepts = Callable[[Any], bool]


def _any(value: Any) -> bool:
    return True


def _only(*neutral: Any) -> Accepts:
    # types are compared too, since True equals 1 and False equals 0
    return lambda value: any(value == one and type(value) is type(one) for one in neutral)


def _empty(value: Any) -> bool:
    return value in ({}, [], "", False)


def _keeps_all(value: Any) -> bool:
    """Whether an Anthropic `context_management` leaves the whole conversation in place."""
    edits = value.get("edits", []) if isinstance(value, dict) else value
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits
    )


HARMLESS: Mapping[str, Accepts] = {
    # who asks, and what is kept about it
    **dict.fromkeys(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "session_id", "chat_id",
         "client_metadata", "litellm_metadata", "litellm_call_id", "litellm_session_id",
         "litellm_trace_id", "prompt_cache_key", "prompt_cache_retention", "cache_prompt",
         "cache_control", "inference_geo", "anthropic_version", "anthropic_beta", "betas",
         "diagnostics"),
        _any,
    ),
    # where and how other servers run a model
    **dict.fromkeys(
        ("provider", "usage", "route", "keep_alive", "num_ctx", "num_gpu", "num_thread",
         "num_batch", "use_mmap", "low_vram", "n_keep", "id_slot", "slot_id",
         "guided_decoding_backend", "timings_per_token", "return_progress"),
        _any,
    ),
    # what tools look like elsewhere
    **dict.fromkeys(("input_examples", "eager_input_streaming", "allowed_callers"), _any),
    # how much is said, where the model has no such setting
    **dict.fromkeys(
        ("verbosity", "enable_thinking", "summary", "generate_summary", "include_obfuscation"), _any
    ),
    # nothing is asked for
    **dict.fromkeys(
        ("audio", "extra_body", "extra_headers", "extra_query", "files", "mcp_servers", "container",
         "defer_loading", "mm_processor_kwargs", "media_io_kwargs", "plugins", "transforms",
         "tool_ids", "web_search", "background", "stop_reason", "skills", "lora_request"),
        _empty,
    ),
    "context_management": _keeps_all,
    "truncation": _only("auto", "disabled"),
    "modalities": _only(["text"]),
    "speed": _only("standard"),
    # settings of other samplers at the value that has no effect
    **dict.fromkeys(("typical_p", "tfs", "tfs_z", "dynatemp_exponent"), _only(1, 1.0)),
    **dict.fromkeys(
        ("top_a", "mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "nsigma",
         "top_n_sigma", "no_repeat_ngram_size", "smoothing_factor", "dynatemp_range",
         "epsilon_cutoff", "eta_cutoff"),
        _only(0, 0.0),
    ),
}  # fmt: skip
"""Fields of other servers of this kind, and with which values they have no effect here."""

SAME_MEANING: tuple[tuple[str, ...], ...] = (
    ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "num_predict",
     "n_predict"),
    ("stop", "stop_sequences"),
    ("messages", "input"),
    ("response_format", "text", "output_config"),
    ("system", "instructions"),
    ("use_activation", "normalize", "softmax"),
    ("dimensions", "output_dimension"),
)  # fmt: skip
"""Fields that different APIs have for the same, for the text of a refusal."""


@runtime_checkable
class NamesFields(Protocol):
    """A body that is translated, so that the engine has other names for some of its fields."""

    def field_of(self, parameter: str) -> str:
        """The field that a parameter of the engine was made from."""
        ...


def text_in(item: Mapping[str, Any], key: str, place: str) -> str:
    """The text that an object at `place` of its body has under a key. Raises InvalidParameter."""
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidParameter(f"{place}.{key}", value, "a string is expected")
    return value


HARMLESS_IN_OBJECTS: Mapping[str, Accepts] = dict.fromkeys(
    ("annotations", "audio", "cache_control", "id", "index", "parsed", "provider_specific_fields",
     "reasoning_details", "reasoning_items", "images", "thinking_blocks", "timestamp", "created_at",
     "metadata", "model", "status", "phase", "citations", "logprobs", "stop_reason", "is_error",
     "additional_kwargs", "response_metadata"),
    _any,
)  # fmt: skip
"""Fields that frameworks leave in the messages that they send back."""


def name_as_sent(error: BaseException, body: object, left_out: Collection[str] = ()) -> None:
    """Let an error name the field of `body` where it names the engine's parameter, in place. Parts
    of lists that were `left_out` count in its indexes.
    """
    if isinstance(error, RequestError) and error.parameter and isinstance(body, NamesFields):
        name = body.field_of(error.parameter)
        error.parameter = _with_index_as_sent(name, left_out) if left_out else name


def _with_index_as_sent(name: str, left_out: Collection[str]) -> str:
    found = _INDEXED.match(name)
    if found is None:
        return name
    place, index = found[1], int(found[2])
    gone = (_INDEXED.fullmatch(each) for each in left_out)
    # in rising order: each part that was left out before this one moves it by one
    for other in sorted(int(each[2]) for each in gone if each is not None and each[1] == place):
        index += other <= index
    return f"{place}[{index}]{name[found.end() :]}"


def unknown_field(param: str, name: str, known: Collection[str]) -> Refusal:
    """The refusal of a field that is not one of the `known`, with the one that was meant."""
    same = next((names for names in SAME_MEANING if name in names), ())
    near = [other for other in same if other in known]
    # the name is cut because the comparison takes time that grows faster than its length
    near = near or difflib.get_close_matches(name[:_MAX_SHOWN], known, 1, _SIMILARITY)
    if near:
        hint = f'Did you mean "{near[0]}"?'
    elif name in HARMLESS:
        hint = "It is accepted only where it has no effect. Remove it."
    else:
        hint = "Remove it, or look at /openapi.json."
    shown = param[:_MAX_SHOWN]
    text = f'{shown}: "{name[:_MAX_SHOWN]}" is not a field here. {hint}'
    return Refusal(400, text, param=shown)
