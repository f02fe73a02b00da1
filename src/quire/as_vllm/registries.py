"""vLLM's ways to register parts of an engine, over the tables that plugins fill (docs/plugins.md).

What is registered has Quire's interfaces, whatever its name.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TypeVar

from quire.lora.resolver import LORA_RESOLVERS, LoRAResolver
from quire.models.formats import METHODS
from quire.plugins.tables import EC_CONNECTORS, KV_CONNECTORS, LOAD_FORMATS, WEIGHT_TRANSFERS

T = TypeVar("T")


def register_quantization_config(quantization: str) -> Callable[[T], T]:
    """A decorator that registers a function which reads `quantization_config` into a Storage
    (quire.models.formats). Raises TypeError for a class, which would compute with vLLM's layers.
    """

    def register(reader: T) -> T:
        METHODS.register(quantization, reader)  # type: ignore[arg-type]
        return reader

    return register


def register_model_loader(load_format: str) -> Callable[[T], T]:
    """A decorator that registers what opens the weights of a folder: `(folder, decoder)` ->
    WeightFiles (quire.models.loading.load_formats). Raises TypeError for a class that loads into
    vLLM's modules.
    """

    def register(opener: T) -> T:
        if hasattr(opener, "load_weights") or hasattr(opener, "load_model"):
            raise TypeError(
                f"{opener!r} loads weights into modules of vLLM, which have no counterpart: "
                "register a function (folder, decoder) that returns the tensors by name, such as a "
                "quire.models.loading.readers.tensor_map.TensorMap."
            )
        LOAD_FORMATS.register(load_format, opener)  # type: ignore[arg-type]
        return opener

    return register


class ECConnectorFactory:
    """Connectors of encoder caches by name."""

    @staticmethod
    def register_connector(name: str, module_path: str, class_name: str) -> None:
        """Register the class `class_name` of a module, below `ECConnectorBase`."""
        EC_CONNECTORS.register(name, f"{module_path}:{class_name}")


class WeightTransferEngineFactory:
    """Backends of weight transfers by name."""

    @staticmethod
    def register_engine(name: str, engine: type | str, class_name: str | None = None) -> None:
        """Register a class below `WeightTransferEngine`, or `class_name` of the module `engine`."""
        given = engine if class_name is None else f"{engine}:{class_name}"
        WEIGHT_TRANSFERS.register(name, given)


class LoRAResolverRegistry:
    """Resolvers of adapters by name."""

    @staticmethod
    def register_resolver(resolver_name: str, resolver: LoRAResolver) -> None:
        """Register what a server asks for adapters that it does not know."""
        LORA_RESOLVERS.register(resolver_name, resolver)

    @staticmethod
    def get_resolver(resolver_name: str) -> LoRAResolver:
        """The resolver of a name. Raises KeyError."""
        return LORA_RESOLVERS[resolver_name]

    @staticmethod
    def get_supported_resolvers() -> Set[str]:
        """The names that are registered."""
        return LORA_RESOLVERS.keys()


class KVConnectorFactory:
    """Connectors of K/V by name."""

    @staticmethod
    def register_connector(name: str, module_path: str, class_name: str) -> None:
        """Register the class `class_name` of a module, below `KVConnectorBase_V1`."""
        KV_CONNECTORS.register(name, f"{module_path}:{class_name}")
