"""`ModelRegistry`: which architectures can be served, by the names that programs ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from quire.errors import NotBuiltYet
from quire.models.families import architectures, family_of, pools


class ModelRegistry:
    """Tells which architectures Quire's own code serves. Others run through transformers; classes
    of models cannot be added.
    """

    @staticmethod
    def get_supported_archs() -> tuple[str, ...]:
        """The names that config.json may have under `architectures`, sorted."""
        return architectures()

    @staticmethod
    def is_text_generation_model(architecture: str | Iterable[str]) -> bool:
        """Whether one of the architectures is known and generates text."""
        return any(not family_of(name).pools for name in _known(architecture))

    @staticmethod
    def is_pooling_model(architecture: str | Iterable[str]) -> bool:
        """Whether one of the architectures is known and pools prompts, as `XModel` and
        `XForSequenceClassification` of a generator X do.
        """
        return any(pools(name) for name in _names(architecture))

    @staticmethod
    def register_model(model_arch: str, model_cls: object) -> NoReturn:
        """Raise NotBuiltYet: a model is a description here, and no class of torch."""
        hint = "model_impl='transformers' runs classes that transformers knows."
        raise NotBuiltYet("model_arch", model_arch, hint)


def _names(architecture: str | Iterable[str]) -> list[str]:
    return [architecture] if isinstance(architecture, str) else list(architecture)


def _known(architecture: str | Iterable[str]) -> list[str]:
    known = set(architectures())
    return [name for name in _names(architecture) if name in known]
