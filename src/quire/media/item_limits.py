"""Bounds on the items of each modality in a prompt (`limit_mm_per_prompt`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidParameter, RequestError

DEFAULT_LIMIT = 999

MODALITIES = ("image", "video", "audio", "vision_chunk")
"""Kinds of items. The last, pictures and pieces of films in one order, no model here takes."""
_SHAPES = {
    "image": ("width", "height"),
    "video": ("num_frames", "width", "height"),
    "audio": ("length",),
    "vision_chunk": (),
}
"""Sizes of the largest item that a limit may also have, for the measurement at the start."""


def read_limits(limits: Mapping[str, Any] | None, *, is_text_only: bool = False) -> dict[str, int]:
    """The most items of each modality. `is_text_only`: none of any (`language_model_only`). Raises
    InvalidParameter for what is not a limit.
    """
    found = dict.fromkeys(MODALITIES, DEFAULT_LIMIT)
    for modality, limit in (limits or {}).items():
        if modality not in MODALITIES:
            allowed = f"the modalities are {', '.join(MODALITIES)}"
            raise InvalidParameter("limit_mm_per_prompt", modality, allowed)
        if isinstance(limit, Mapping):
            for key in limit.keys() - {"count"}:
                if key not in _SHAPES[modality] or not _is_count(limit[key]):
                    allowed = f"{modality} has count, {', '.join(_SHAPES[modality])}, all numbers"
                    raise InvalidParameter(f"limit_mm_per_prompt.{modality}", dict(limit), allowed)
            limit = limit.get("count", DEFAULT_LIMIT)
        if not _is_count(limit):
            raise InvalidParameter(
                f"limit_mm_per_prompt.{modality}", limit, "a limit is a whole number, 0 or more"
            )
        found[modality] = limit
    return dict.fromkeys(MODALITIES, 0) if is_text_only else found


def check_count(num: int, limit: int, modality: str = "image") -> None:
    """Raise RequestError for more items of a modality than a prompt may have."""
    if num > limit:
        raise RequestError(
            f"At most {limit} {modality}(s) may be provided in one prompt. Set "
            "`--limit-mm-per-prompt` to increase this limit.",
            parameter=modality,
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
