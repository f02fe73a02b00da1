"""Files of Kimi-VL and Kimi K2.5 as they are published, whose processors are code of their own: the
same settings under the names of transformers' class for Kimi K2.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnknownConfigKey, UnsupportedConfigValue

KINDS = ("kimi_vl", "kimi_k25")
_PROCESSOR = {"kimi_vl": "KimiVLProcessor", "kimi_k25": "Kimi_K25Processor"}
_NESTED = "media_proc_cfg"
_KEYS = {
    "patch_size": "patch_size",
    "in_token_limit": "max_patches",
    "in_patch_limit": "max_patches",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
"""A name in the files -> that of the class."""
_WITHOUT_EFFECT = frozenset(
    {
        *("image_processor_type", "processor_class", "auto_map", "num_pooled_tokens"),
        *("config_type", "in_patch_limit_each_frame", "in_patch_limit_video", "sample_fps"),
        *("max_num_frames_each_video", "temporal_merge_kernel_size", "timestamp_mode"),
    }
)
_ONLY = {"pad_input": True, "fixed_output_tokens": None}


def kimi_files(
    config: Mapping[str, Any], processor: Mapping[str, Any], image: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The processor_config.json and the preprocessor_config.json that say the same; files in
    transformers' form as they are. Raises UnsupportedConfigValue and UnknownConfigKey.
    """
    nested = image.get(_NESTED)
    if not isinstance(nested, Mapping):
        if image.get("image_processor_type") != "KimiVLImageProcessor":
            return dict(processor), dict(image)
        nested = image
    side = nested.get("patch_limit_on_one_side", 512)
    found: dict[str, Any] = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "size": {"max_height": side, "max_width": side},
        "merge_size": _merge(nested.get("merge_kernel_size", 2)),
    }
    for key, value in nested.items():
        if key in _KEYS:
            found[_KEYS[key]] = value
        elif key in _ONLY and value != _ONLY[key]:
            text = f"preprocessor_config.json has {key}={value!r}, and {_ONLY[key]!r} is served."
            raise UnsupportedConfigValue(text)
        elif key not in _ONLY and key not in _WITHOUT_EFFECT and key not in _SIZES:
            raise UnknownConfigKey(
                f"preprocessor_config.json has {key}, whose meaning is not implemented."
            )
    return {"processor_class": _PROCESSOR[str(config.get("model_type"))]}, found


_SIZES = ("patch_limit_on_one_side", "merge_kernel_size")


def _merge(given: object) -> object:
    """The side of a square that is given by one number or two."""
    if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
        return given[0]
    return given
