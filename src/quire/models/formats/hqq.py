"""HQQ (Badri & Shaji 2023): codes of one to eight bits in groups whose zero points are numbers with
a fraction, under the names of hqq's own state of a module.
"""

from __future__ import annotations

import re

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.keys import group_size, names
from quire.models.formats.storage import CodeLayout, Storage

_BITS = (1, 2, 3, 4, 8)
_QUANTISED_SCALES = ("scale_quant_params", "zero_quant_params")
_OF_TAGS = re.compile(r"(?:^|\.)(?:model|layers|\d+)(?=\.|$)")
"""Parts of a module's name that its tag leaves out."""


def read_hqq(reader: ConfigReader) -> Storage:
    """One config for all linear modules that are not skipped, or by tag (`self_attn.q_proj`)."""
    kept = names(reader, "skip_modules")
    section = reader.section("quant_config")
    if section is None:
        raise unsupported(reader.at("quant_config"), {}, "an object with weight_quant_params")
    by_tag: dict[str, CodeLayout] = {}
    overall = _layout(section) if "weight_quant_params" in section else None
    if overall is None:
        for tag in section.keys():  # noqa: SIM118
            own = section.section(tag)
            if own is None:
                raise unsupported(section.at(tag), {}, "an object with weight_quant_params")
            by_tag[tag] = _layout(own)
            own.finish()

    def layout_of(module: str) -> CodeLayout | None:
        tag = _OF_TAGS.sub("", module).removeprefix(".")
        return None if tag in kept or module in kept else by_tag.get(tag, overall)

    return Storage(
        "hqq",
        layout_of,
        is_decided_by_files=True,
        group=0,
        widened_because="products take whole numbers as zero points, and groups of HQQ have others",
    )


def _layout(reader: ConfigReader) -> CodeLayout:
    reader.ignore("offload_meta")
    for key in _QUANTISED_SCALES:
        reader.only(key)
    weights = reader.section("weight_quant_params")
    if weights is None:
        raise unsupported(reader.at("weight_quant_params"), {}, "how weights are quantised")
    weights.ignore("optimize", "round_zero")  # how zero points were found
    weights.only("channel_wise", True)
    weights.only("view_as_float", False)
    return CodeLayout(
        "hqq" if weights.choice_of("axis", 0, 1, absent=1) else "hqq-axis0",
        weights.choice_of("nbits", *_BITS),
        group_size(weights, "group_size"),
        has_zeros=True,
    )
