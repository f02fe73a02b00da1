"""Whose code runs a model: Quire's decoder, where a family describes the architecture, or
transformers' with Quire's attention. Free of torch until transformers is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quire.errors import NotBuiltYet, UnsupportedArchitecture
from quire.models.config_reader import ConfigReader
from quire.models.families import ADDED, added_class, find_family, read_with_foreign
from quire.models.foreign import library
from quire.models.foreign.spec import ForeignDecoder
from quire.models.pooling.conversion import Form
from quire.models.pooling.spec import PoolerSpec
from quire.models.reading.keys import LeftKey, foreign_among
from quire.models.reading.reference import reference_of
from quire.models.reading.text_part import PART, outer_objects
from quire.models.spec import Decoder

ModelImpl = Literal["quire", "transformers"]
AnyDecoder = Decoder | ForeignDecoder


def choose_implementation(config: Mapping[str, Any], asked: str) -> tuple[ModelImpl, str]:
    """The implementation for a config.json, and the reason. `asked` is the option model_impl.

    Raises UnsupportedArchitecture where there is none.
    """
    if asked == "transformers":
        library.require()
        return "transformers", "model_impl was given"
    named = (config.get("architectures") or [None])[0]
    if asked == "auto" and added_class(named) is not None:
        library.require()
        return "transformers", f"its class was registered by {ADDED.holder(named)}"
    try:
        find_family(config)
    except UnsupportedArchitecture as error:
        if asked != "auto" or not config.get("architectures") or PART in config:
            raise
        if not library.is_installed():
            more = "pip install 'quire[transformers]' adds those that run through transformers."
            raise UnsupportedArchitecture(f"{error} {more}") from None
        if not library.knows(config):
            raise
        return "transformers", "no family of Quire's describes the architecture"
    return "quire", "a family of Quire's describes the architecture"


def describe_model(
    config: Mapping[str, Any],
    implementation: str,
    pooler: PoolerSpec | None = None,
    form: Form | None = None,
) -> AnyDecoder:
    """The description of a config.json's model for one of the implementations; `pooler` and `form`:
    see `find_family`.

    Raises LoadError subclasses for what cannot run: see `read_spec` and `describe_foreign`.
    """
    return describe_with_foreign(config, implementation, pooler, form)[0]


def describe_with_foreign(
    config: Mapping[str, Any],
    implementation: str,
    pooler: PoolerSpec | None = None,
    form: Form | None = None,
) -> tuple[AnyDecoder, tuple[LeftKey, ...]]:
    """As `describe_model`, and the foreign keys of the config (reading/keys.py)."""
    if implementation == "quire":
        return read_with_foreign(config, pooler, form)
    if pooler is not None or form is not None:
        hint = "Use a model that has a family of Quire's: see docs/models.md."
        raise NotBuiltYet("runner", "pooling with model_impl=transformers", hint)
    from quire.models.foreign.dry_run import describe_foreign  # imports torch and transformers

    return describe_foreign(config), _foreign_to_transformers(config)


def _foreign_to_transformers(config: Mapping[str, Any]) -> tuple[LeftKey, ...]:
    """Keys of a config.json that transformers ignores, but for those that say nothing."""
    reference = reference_of(config["architectures"], config.get("model_type"))
    if reference is None:
        return ()
    reader = ConfigReader(config)
    reader.ignore(PART, *reference.keys)
    return foreign_among(reader.left(), reference, outer_objects(config), is_closed=False)
