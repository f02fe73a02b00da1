"""`ModelRegistry`: which architectures can be served, by the names that programs ask for."""

from __future__ import annotations

from collections.abc import Iterable

from quire.models.added import AddedModel
from quire.models.families import ADDED, added_class, architectures, family_of, pools


class ModelRegistry:
    """Tells which architectures are served by Quire's own code, and takes others. Those of
    transformers run without being registered.
    """

    @staticmethod
    def get_supported_archs() -> tuple[str, ...]:
        """The names that config.json may have under `architectures`, sorted."""
        return architectures()

    @staticmethod
    def is_text_generation_model(architecture: str | Iterable[str]) -> bool:
        """Whether one of the architectures is known and generates text."""
        known = _known(architecture)
        return any(added_class(name) is not None or not family_of(name).pools for name in known)

    @staticmethod
    def is_pooling_model(architecture: str | Iterable[str]) -> bool:
        """Whether one of the architectures is known and pools prompts, as `XModel` and
        `XForSequenceClassification` of a generator X do.
        """
        return any(pools(name) for name in _names(architecture))

    @staticmethod
    def register_model(model_arch: str, model_cls: AddedModel) -> None:
        """Have models whose config.json names `model_arch` run by `model_cls`: a Family
        (quire.models.rules), a class of transformers, or the name of either as "<module>:<name>",
        which is imported in each process that needs it. Registering the same again changes nothing.

        Raises PluginError (a ValueError) for an architecture that is Quire's own or was registered
        as something else, UnsupportedArchitecture for a class that cannot run, TypeError and
        ValueError for what is not a model.
        """
        ADDED.register(model_arch, model_cls)


def _names(architecture: str | Iterable[str]) -> list[str]:
    return [architecture] if isinstance(architecture, str) else list(architecture)


def _known(architecture: str | Iterable[str]) -> list[str]:
    known = set(architectures())
    return [name for name in _names(architecture) if name in known]
