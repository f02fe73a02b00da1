"""Whose code runs a model: Quire's decoder, where a family describes the architecture, or
transformers' with Quire's attention. Free of torch until transformers is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quire.errors import NotBuiltYet, UnsupportedArchitecture
from quire.models.families import find_family, read_spec
from quire.models.foreign import library
from quire.models.foreign.spec import ForeignDecoder
from quire.models.pooling.conversion import Form
from quire.models.pooling.spec import PoolerSpec
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
    try:
        find_family(config)
    except UnsupportedArchitecture as error:
        if asked != "auto" or not config.get("architectures"):
            raise
        if not library.is_installed():
            more = "pip install 'quire[transformers]' adds those that run through transformers."
            raise UnsupportedArchitecture(f"{_beginning(error)} {more}") from None
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
    if implementation == "quire":
        return read_spec(config, pooler, form)
    if pooler is not None or form is not None:
        hint = "Use a model that has a family of Quire's: see docs/models.md."
        raise NotBuiltYet("runner", "pooling with model_impl=transformers", hint)
    from quire.models.foreign.dry_run import describe_foreign  # imports torch and transformers

    return describe_foreign(config)


def _beginning(error: Exception) -> str:
    """The error without its list of what is known, which would push the advice out of sight."""
    return str(error).partition("; known are")[0].rstrip(".") + "."
