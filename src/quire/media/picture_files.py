"""The processing of a checkpoint's pictures, and their place in prompts, by its side files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import LoadError, RequestError, UnknownParameter, UnsupportedConfigValue
from quire.media import internvl_chat, kimi_files
from quire.media.image_processors.processor import ImageProcessor
from quire.media.image_processors.table import (
    changeable_settings,
    processor_name,
    read_processor,
)
from quire.media.prompt_rules.facts import PromptFacts
from quire.media.prompt_rules.rule import PromptRule
from quire.media.prompt_rules.table import read_rule
from quire.text.json_files import read_json

_OF_FILMS = frozenset({"fps", "num_frames", "do_sample_frames"})
"""Keys of processors that say nothing about a picture."""
_SCOPES = ("images_kwargs", "videos_kwargs", "audio_kwargs", "text_kwargs", "common_kwargs")


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """`processor` is the JSON of the image processor as the processor class changes it; `rule` is
    None for models whose pictures are not part of a prompt (CLIP).
    """

    processor: dict[str, Any]
    rule: PromptRule | None

    def changed(self, mm_processor_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """The JSON with what a request or the server sets, flat or under `images_kwargs`. What a
        key has already may be said again, and keys of films are for others. Raises
        UnknownParameter for keys that the processor does not have or that belong to the encoder,
        RequestError for values that make no sense.
        """
        given = dict(mm_processor_kwargs or {})
        scoped = given.pop("images_kwargs", None) or {}
        # those of other media are not for pictures
        for scope in _SCOPES:
            given.pop(scope, None)
        given |= scoped
        given = {
            key: value
            for key, value in given.items()
            if key not in _OF_FILMS and (key not in self.processor or self.processor[key] != value)
        }
        if not given:
            return self.processor
        known = changeable_settings(processor_name(self.processor))
        for key in given:
            if key not in known:
                allowed = f"of this model's image processor change {', '.join(sorted(known))}"
                raise UnknownParameter(f"mm_processor_kwargs.{key}", allowed)
        values = {**self.processor, **given}
        if "size" in given:  # it means the same as these, which would win otherwise
            for key in ("min_pixels", "max_pixels"):
                if key not in given:
                    values.pop(key, None)
        try:
            read_processor(values)
        except LoadError as error:
            text = f"mm_processor_kwargs cannot be used: {error}"
            raise RequestError(text, parameter="mm_processor_kwargs") from None
        return values

    def read(self) -> ImageProcessor:
        """The processor, for sizes: pixels are made in another process."""
        return read_processor(self.processor)


def read_picture_settings(folder: Path, config: Mapping[str, Any]) -> PictureSettings | None:
    """The settings of a checkpoint folder whose config.json is `config`; None where no file says
    how pictures are processed. Raises LoadError, which names what is not implemented.
    """
    processor = read_json(folder / "processor_config.json")
    image = read_json(folder / "preprocessor_config.json")
    nested = processor.get("image_processor")
    if isinstance(nested, Mapping):
        # newer releases of transformers have the image processor in this file
        image = dict(nested)
    if config.get("model_type") == internvl_chat.KIND:
        processor, image = internvl_chat.chat_files(config, image)
    elif config.get("model_type") in kimi_files.KINDS:
        processor, image = kimi_files.kimi_files(config, processor, image)
    if not image:
        return None
    if not image.get("image_processor_type") and not image.get("feature_extractor_type"):
        return None
    name = processor.get("processor_class") or image.get("processor_class")
    name = name or _USUAL.get(str(config.get("model_type")))
    tokens = named_tokens(read_json(folder / "tokenizer_config.json"))
    return picture_settings(name, PromptFacts(processor, image, config, tokens))


def picture_settings(name: str | None, facts: PromptFacts) -> PictureSettings:
    """The settings of a processor class. Both processor and rule are read, for their refusals."""
    rule = None
    values = dict(facts.image)
    if name not in ENCODERS_ALONE:
        if not isinstance(name, str):
            raise UnsupportedConfigValue(
                "Neither processor_config.json nor preprocessor_config.json has a processor_class, "
                "so it is not known how pictures stand in a prompt. Add the model's."
            )
        rule = read_rule(name, facts)
        values = rule.processor_settings(values)
    read_processor(values)
    return PictureSettings(values, rule)


ENCODERS_ALONE = frozenset({"CLIPProcessor", "SiglipProcessor", "Siglip2Processor"})
"""Processors of models whose pictures are not part of a prompt."""
_USUAL = {"clip": "CLIPProcessor", "siglip": "SiglipProcessor", "siglip2": "Siglip2Processor"}
"""Processors by the `model_type` of models whose early files do not name one."""


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that tokenizer_config.json has names for."""
    found: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    specific = config.get("model_specific_special_tokens")
    # the last one counts: a name at the top beats those in groups
    for source in (extra, specific, config):
        if not isinstance(source, Mapping):
            continue
        for name, value in source.items():
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and name.endswith("_token"):
                found[name] = value
    return found


def check_picture_files(settings: PictureSettings | None, model: str) -> PictureSettings:
    """The settings, of a model that takes pictures. Raises LoadError where there are none."""
    if settings is None:
        raise LoadError(
            f"{model} takes pictures and has no preprocessor_config.json that says how they are "
            "processed. Fetch the model's files anew, or serve text alone with "
            "--language-model-only."
        )
    return settings
