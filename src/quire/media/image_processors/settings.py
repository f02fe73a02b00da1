"""Reads the JSON of an image processor, and refuses what nobody has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import UnknownConfigKey, UnsupportedConfigValue

NEUTRAL = frozenset(
    {
        *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
        *("_processor_class", "_valid_processor_keys", "_valid_kwargs_names", "backend"),
        *("do_convert_rgb", "data_format", "input_data_format", "return_tensors", "device"),
        *("disable_grouping", "default_to_square", "image_seq_length", "return_row_col_info"),
        *("use_fast", "name_or_path", "transformers_version"),
        *("aspect_ratio_setting", "video_sampling", "vision_feature_select_strategy"),
    }
)
"""Keys that change no pixel: pictures are RGB before they are processed, and sizes of batches,
places of tensors and settings for videos concern others.
"""

SHARED = frozenset(
    {
        *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_pad", "pad_size"),
        *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    }
)
"""Keys that every class of the reference accepts, also where its own steps do not read them."""


@dataclass(frozen=True, slots=True)
class SizeSetting:
    """A size as processor files write it; what is not given is 0."""

    height: int = 0
    width: int = 0
    shortest_edge: int = 0
    longest_edge: int = 0
    max_height: int = 0
    max_width: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether it names both sides."""
        return bool(self.height and self.width)


class ProcessorSettings:
    """The keys of a processor's JSON, each read once with its default. A null is the default.

    `name` is the class, which errors show. `finish` raises UnknownConfigKey for keys that no step
    has read and that are not known to be without effect.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self._values = values
        self.read: set[str] = set()

    def value(self, key: str, default: Any) -> Any:
        # what a processor asks for is what it implements: `finish` refuses the rest
        self.read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, value, "it is true or false")
        return value

    def whole(self, key: str, default: int, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise self.refused(key, value, "it is a whole number")
        if not least <= value <= 2**31:
            raise self.refused(key, value, f"it is at least {least}")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self.refused(key, value, "it is a positive number")
        return float(value)

    def resample(self, default: int) -> int:
        """The number that Pillow has for a filter."""
        value = self.value("resample", default)
        if isinstance(value, bool) or value not in range(6):
            raise self.refused("resample", value, "the filters of Pillow are 0 to 5")
        return int(value)

    def channels(self, key: str, default: Sequence[float]) -> tuple[float, float, float]:
        """A number for each of red, green and blue; one number is for all three."""
        value = self.value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = [value] * 3
        if (
            not isinstance(value, list | tuple)
            or len(value) != 3
            or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
        ):
            raise self.refused(key, value, "it has a number for each of three channels")
        red, green, blue = (float(v) for v in value)
        return red, green, blue

    def size(
        self, key: str, default: Mapping[str, int] | None, *, is_square: bool
    ) -> SizeSetting | None:
        """A size. `is_square`: one number stands for both sides, else for the shortest edge."""
        value = self.value(key, default)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = {"height": value, "width": value} if is_square else {"shortest_edge": value}
        elif isinstance(value, list | tuple) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if not isinstance(value, Mapping):
            raise self.refused(key, value, "it is an object with sides")
        sides = {name: side for name, side in value.items() if side is not None}
        for name, side in sides.items():
            if name not in SizeSetting.__slots__:
                raise self.refused(key, value, f"{name!r} is not a side that is known")
            if isinstance(side, bool) or not isinstance(side, int | float) or side != int(side):
                raise self.refused(key, value, "its sides are whole numbers")
            if not 0 < side <= 2**31:
                raise self.refused(key, value, "its sides are positive")
        return SizeSetting(**{name: int(side) for name, side in sides.items()})

    def refused(self, key: str, value: object, allowed: str) -> UnsupportedConfigValue:
        """The error for a value that is not implemented or makes no sense."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return UnsupportedConfigValue(f"{self.name} has {key}={shown}, and {allowed}.")

    def finish(self) -> None:
        """Refuse what is left."""
        known = self.read | NEUTRAL | SHARED
        # a key that is not read could change the pixels, and answers would be silently worse
        left = sorted(k for k, v in self._values.items() if v is not None and k not in known)
        if left:
            raise UnknownConfigKey(
                f"{self.name} is configured with {', '.join(left)}, which could change the pixels "
                "and is not implemented. Remove it from preprocessor_config.json if it has no "
                "effect on this model."
            )
