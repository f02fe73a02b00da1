"""Rules for the pictures of InternVL checkpoints as they are published (`internvl_chat`). Their
files have none of them: pictures are cut by keys of config.json, with constants of the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedConfigValue

KIND = "internvl_chat"
PROCESSOR = "InternVLChatProcessor"
"""The name of the rule: the published code has no class for it."""
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_BICUBIC = 3


def chat_files(
    config: Mapping[str, Any], image: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The processor_config.json and the preprocessor_config.json that say the same as config.json,
    whose `image` has the colours. Raises UnsupportedConfigValue.
    """
    vision = config["vision_config"]
    side = config.get("force_image_size") or vision.get("image_size", 448)
    patch, ratio = vision.get("patch_size", 14), config.get("downsample_ratio", 0.5)
    _check(config, side, patch)
    cuts = config.get("dynamic_image_size", True)
    rows = int(side // patch * ratio)
    processor = {"processor_class": PROCESSOR, "image_seq_length": rows**2}
    return processor, {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "resample": _BICUBIC,
        "min_patches": config.get("min_dynamic_patch", 1) if cuts else 1,
        "max_patches": config.get("max_dynamic_patch", 12) if cuts else 1,
        "image_mean": image.get("image_mean", _MEAN),
        "image_std": image.get("image_std", _STD),
    }


def _check(config: Mapping[str, Any], side: object, patch: object) -> None:
    allowed: dict[str, tuple[Any, ...]] = {"pad2square": (False,), "use_thumbnail": (True,)}
    if not config.get("dynamic_image_size", True):
        allowed["use_thumbnail"] = (True, False)
    for key, values in allowed.items():
        if (found := config.get(key, values[0])) not in values:
            raise UnsupportedConfigValue(f"config.json has {key}={found!r}, which is not served.")
    for key, value in (("image_size", side), ("patch_size", patch)):
        if not isinstance(value, int) or not 0 < value < 2**16:
            raise UnsupportedConfigValue(
                f"config.json has {key}={value!r}, not a number of pixels."
            )
