"""bitsandbytes: whole numbers of a byte with a scale per output (Dettmers et al. 2022, LLM.int8()),
and numbers of four bits, nf4 or fp4, with a scale for each block of the flattened weight (Dettmers
et al. 2023, QLoRA).
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.keys import names
from quire.models.formats.storage import CodeLayout, Packing, RowScheme, Storage

BLOCK = 64
"""Weights with one scale. The config does not say how many, the state of each weight does."""

_IRRELEVANT = (
    # which type the library's own products are in, and where weights are kept that are not int8
    *("bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload"),
)
_OF_FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")
_PACKINGS: dict[str, Packing] = {"nf4": "bitsandbytes-nf4", "fp4": "bitsandbytes-fp4"}


def read_bitsandbytes(reader: ConfigReader) -> Storage:
    """Modules that the files store plainly need not be listed."""
    reader.rename(load_in_4bit="_load_in_4bit", load_in_8bit="_load_in_8bit")
    reader.ignore(*_IRRELEVANT)
    reader.only("llm_int8_has_fp16_weight", False)
    has_four = reader.flag("load_in_4bit", False)
    has_eight = reader.flag("load_in_8bit", False)
    if has_four == has_eight:
        allowed = "true where load_in_8bit is false, and false where that is true"
        raise unsupported(reader.at("load_in_4bit"), has_four, allowed)
    kept = names(reader, "llm_int8_skip_modules")
    threshold = reader.number("llm_int8_threshold", 6.0, minimum=0.0)
    if has_four:
        layout = _four_bits(reader)
    else:
        reader.ignore(*_OF_FOUR_BITS)
        # above the threshold the library keeps activations in 16 bits, value by value; products
        # here have no such outliers, so that all activations keep their values then
        rows = None if threshold else RowScheme()
        layout = CodeLayout(
            "bitsandbytes-int8", 8, None, has_zeros=False, scale_name="SCB", rows=rows
        )

    def layout_of(module: str) -> CodeLayout | None:
        return None if any(f".{name}." in f".{module}." for name in kept) else layout

    return Storage(
        "bitsandbytes",
        layout_of,
        is_decided_by_files=True,
        group=layout.group or 0,
        skipped_rounding=None if has_four or not threshold else "to 8 bits but for outliers",
    )


def _four_bits(reader: ConfigReader) -> CodeLayout:
    reader.only("bnb_4bit_quant_storage", "uint8")
    return CodeLayout(
        reader.choice("bnb_4bit_quant_type", _PACKINGS, "fp4"),
        4,
        BLOCK,
        has_zeros=False,
        is_nested=reader.flag("bnb_4bit_use_double_quant", False),
    )
