"""The image processors by the names that checkpoints have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedConfigValue
from quire.media.image_processors.anyres import LlavaNextProcessor, LlavaOnevisionProcessor
from quire.media.image_processors.gemma import Gemma3Processor, Gemma4Processor
from quire.media.image_processors.grids import (
    Cohere2VisionProcessor,
    GotOcr2Processor,
    Llama4Processor,
)
from quire.media.image_processors.lfm2 import Lfm2VlProcessor
from quire.media.image_processors.patches import (
    Glm4vProcessor,
    KimiK25Processor,
    PaddleOCRVLProcessor,
    PixtralProcessor,
    Qwen2VLProcessor,
)
from quire.media.image_processors.plain import (
    ClipProcessor,
    LlavaProcessor,
    Siglip2Processor,
    SiglipProcessor,
)
from quire.media.image_processors.processor import ImageProcessor
from quire.media.image_processors.settings import SHARED, ProcessorSettings
from quire.media.image_processors.split import Idefics3Processor

PROCESSORS: dict[str, type[ImageProcessor]] = {
    "CLIPImageProcessor": ClipProcessor,
    "SiglipImageProcessor": SiglipProcessor,
    "Siglip2ImageProcessor": Siglip2Processor,
    "LlavaImageProcessor": LlavaProcessor,
    "LlavaNextImageProcessor": LlavaNextProcessor,
    "LlavaOnevisionImageProcessor": LlavaOnevisionProcessor,
    "Qwen2VLImageProcessor": Qwen2VLProcessor,
    "Glm4vImageProcessor": Glm4vProcessor,
    "Glm46VImageProcessor": Glm4vProcessor,
    "Kimi_K25ImageProcessor": KimiK25Processor,
    "PaddleOCRVLImageProcessor": PaddleOCRVLProcessor,
    "PixtralImageProcessor": PixtralProcessor,
    "Idefics3ImageProcessor": Idefics3Processor,
    "SmolVLMImageProcessor": Idefics3Processor,
    "Gemma3ImageProcessor": Gemma3Processor,
    "Gemma4ImageProcessor": Gemma4Processor,
    "GotOcr2ImageProcessor": GotOcr2Processor,
    "Cohere2VisionImageProcessor": Cohere2VisionProcessor,
    "Llama4ImageProcessor": Llama4Processor,
    "Lfm2VlImageProcessor": Lfm2VlProcessor,
}

_OTHER_NAMES = {
    "CLIPFeatureExtractor": "CLIPImageProcessor",
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "Qwen3VLImageProcessor": "Qwen2VLImageProcessor",
}
"""Names of older and intermediate releases."""


def processor_name(values: Mapping[str, Any]) -> str:
    """The class that the JSON names, without the endings of its variants."""
    name = values.get("image_processor_type") or values.get("feature_extractor_type")
    if not isinstance(name, str):
        raise UnsupportedConfigValue(
            "preprocessor_config.json has no image_processor_type, so it is not known how pictures "
            "become pixels. Add the name of the model's image processor."
        )
    # variants of one class, which differ in the library that does the same to a picture
    for ending in ("Fast", "Pil"):
        name = name.removesuffix(ending)
    return _OTHER_NAMES.get(name, name)


def read_processor(values: Mapping[str, Any]) -> ImageProcessor:
    """The processor of a JSON. Raises UnsupportedConfigValue and UnknownConfigKey, by name."""
    name = processor_name(values)
    if name not in PROCESSORS:
        raise UnsupportedConfigValue(
            f"The image processor {name} is not implemented. Those that are: "
            f"{', '.join(sorted(PROCESSORS))}."
        )
    settings = ProcessorSettings(name, values)
    processor = PROCESSORS[name].read(settings)
    settings.finish()
    return processor


_OF_ENCODERS = frozenset(
    {
        *("patch_size", "merge_size", "temporal_patch_size", "encoder_patch_size"),
        *("downsample_factor", "pooling_kernel_size", "max_image_size", "max_num_patches"),
    }
)
"""Keys that say how the encoder is made."""
_OF_TILES = frozenset(
    {"size", "crop_size", "do_resize", "do_center_crop", "do_pad", "pad_size", "use_square_size"}
)
"""Keys that say how an encoder is made that knows one size of a picture or tile."""
_OF_ANY_SIZE = (Siglip2Processor, Qwen2VLProcessor, PixtralProcessor, KimiK25Processor)
_OF_OTHER_SIZES = (Gemma4Processor, Lfm2VlProcessor, Idefics3Processor)


def changeable_settings(name: str) -> frozenset[str]:
    """The keys of a processor that requests may change: its encoder takes every result."""
    settings, kind = ProcessorSettings(name, {}), PROCESSORS[name]
    # reading an empty JSON tells which keys the class knows
    kind.read(settings)
    keys = (frozenset(settings.read) | SHARED) - _OF_ENCODERS
    return keys if issubclass(kind, _OF_ANY_SIZE + _OF_OTHER_SIZES) else keys - _OF_TILES
