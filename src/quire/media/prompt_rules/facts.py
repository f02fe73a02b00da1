"""The source of a rule: the side files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import UnsupportedConfigValue


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """`processor` is processor_config.json, `image` the JSON of the image processor, `config`
    config.json, `tokens` the tokens that the tokenizer has names for ("image_token").
    """

    processor: Mapping[str, Any] = field(default_factory=dict)
    image: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)

    def token(self, name: str, default: str | None = None) -> str:
        """The text of a token: the processor's, the tokenizer's, or the default."""
        for source in (self.processor, self.tokens):
            value = source.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and value:
                return value
        if default is None:
            raise UnsupportedConfigValue(
                f"tokenizer_config.json has no {name}, so it is not known how pictures stand in a "
                "prompt. Use the tokenizer files of the model's current release."
            )
        return default

    def whole(self, name: str, default: int | None = None, *, source: str = "processor") -> int:
        """A positive whole number of one of the files."""
        value = {"processor": self.processor, "image": self.image}[source].get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**24:
            file = {"processor": "processor_config.json", "image": "preprocessor_config.json"}
            text = f"{file[source]} has {name}={value!r}, and a positive whole number is needed."
            raise UnsupportedConfigValue(text)
        return value

    def vision(self, name: str) -> Any:
        """A value of the vision part of config.json, or None."""
        return self._of_part("vision_config", name)

    def text(self, name: str) -> Any:
        """A value of the text part of config.json, or None."""
        return self._of_part("text_config", name)

    def _of_part(self, part: str, name: str) -> Any:
        values = self.config.get(part)
        return values.get(name) if isinstance(values, Mapping) else None
