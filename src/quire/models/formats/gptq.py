"""GPTQ (Frantar et al. 2023): codes of four or eight bits, packed along inputs, both versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.formats.expressions import Expressions
from quire.models.formats.keys import OF_AUTO_ROUND, group_size
from quire.models.formats.storage import CodeLayout, Storage

_VERSIONS = {"gptq": True, "gptq_v2": False}
"""Name of a version -> whether zero points are stored as one less than they are."""

_IRRELEVANT = (
    # how it was made, and with which kernels another library runs it
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset", "meta"),
    *("model_name_or_path", "model_file_base_name", "tokenizer", "batch_size", "backend"),
    *("block_name_to_quantize", "cache_block_outputs", "disable_exllama", "exllama_config"),
    *("max_input_length", "module_name_preceding_first_block", "pad_token_id", "use_cuda_fp16"),
    *("use_exllama", "model_seqlen", "mse", "act_group_aware", "sym", "lm_head", "hyb_act"),
    *("modules_in_block_to_quantize",),  # the files say which they are
)


def read_gptq(reader: ConfigReader) -> Storage:
    """Codes have zero points, whether they are symmetric or not: the files say which. Modules that
    the files store plainly (head, routers) are not listed.
    """
    reader.ignore(*_IRRELEVANT, *OF_AUTO_ROUND)
    reader.only("method", "gptq")  # quant_method once more, in files of GPTQModel
    reader.only("data_type", "int")
    reader.only("is_marlin_format", False)
    reader.only("pack_dtype", "int32")
    version = "checkpoint_format" if "checkpoint_format" in reader else "format"
    is_one_less = reader.choice(version, _VERSIONS, "gptq")
    reader.choice("format", _VERSIONS, "gptq")
    layout = CodeLayout(
        "gptq",
        reader.choice_of("bits", 4, 8),
        group_size(reader, "group_size"),
        has_zeros=True,
        is_reordered=reader.flag("desc_act", False),
        is_one_less=is_one_less,
    )
    rules = _dynamic(reader, layout)

    def layout_of(module: str) -> CodeLayout | None:
        for matches, own in rules:
            if matches.match(module):
                return own
        return layout

    own = [layout, *(changed for _, changed in rules if changed is not None)]
    group = max(one.group or 0 for one in own)
    return Storage("gptq", layout_of, is_decided_by_files=True, group=group)


def _dynamic(reader: ConfigReader, layout: CodeLayout) -> list[tuple[Any, CodeLayout | None]]:
    """Entries of `dynamic` for modules by pattern, None: kept as they are; the first counts."""
    section = reader.section("dynamic")
    if section is None:
        return []
    keys = section.keys()
    texts = [key.removeprefix("+:").removeprefix("-:") for key in keys]
    rules: list[tuple[Any, CodeLayout | None]] = []
    compiled = Expressions().compile(texts, reader.at("dynamic"))
    for key, matches in zip(keys, compiled, strict=True):
        if key.startswith("-:"):
            # counts as read: nothing else is needed of modules that are kept as they are
            section.raw(key, {})
            rules.append((matches, None))
        else:
            rules.append((matches, _overridden(section, key, layout)))
    return rules


def _overridden(section: ConfigReader, key: str, layout: CodeLayout) -> CodeLayout:
    own = section.section(key)
    if own is None:
        return layout
    own.ignore("sym", "damp_percent", "mse", "static_groups", "true_sequential", "meta")
    return replace(
        layout,
        bits=own.choice_of("bits", 4, 8, absent=layout.bits),
        group=group_size(own, "group_size") if "group_size" in own else layout.group,
        is_reordered=own.flag("desc_act", layout.is_reordered),
    )
