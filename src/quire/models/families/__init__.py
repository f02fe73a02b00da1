"""Which family describes an architecture, and the way from a config to a spec. Families are
imported when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quire.errors import UnsupportedArchitecture
from quire.models.config_reader import ConfigReader
from quire.models.rules import Family
from quire.models.spec import Decoder

_MODULES = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LLaMAForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Starcoder2ForCausalLM": "starcoder2",
}


def architectures() -> tuple[str, ...]:
    """The names that config.json may have under `architectures`, sorted."""
    return tuple(sorted(_MODULES))


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of the first architecture that config.json names and we know.

    Raises UnsupportedArchitecture, which lists what is known; code that a repository brings along
    is never run.
    """
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UnsupportedArchitecture(
            f"config.json: architectures={named!r} is not a list of names."
        )
    for name in named:
        if name in _MODULES:
            return family_module(_MODULES[name])
    raise UnsupportedArchitecture(_refusal(named, config))


def family_module(name: str) -> Family:
    """The family by the name of its module (`llama`, `qwen3`, ...)."""
    family = import_module(f".{name}", __package__).FAMILY
    assert isinstance(family, Family)
    return family


def family_names() -> tuple[str, ...]:
    """The modules of this folder that hold a family, sorted."""
    return tuple(sorted(set(_MODULES.values())))


def read_spec(config: Mapping[str, Any]) -> Decoder:
    """The spec of the model that a config.json describes.

    Raises UnsupportedArchitecture, UnknownConfigKey for a key of unknown meaning,
    UnsupportedConfigValue for a known key at a value that is not implemented, LoadError for a
    missing key.
    """
    family = find_family(config)
    reader = ConfigReader(config)
    decoder = family.describe(reader)
    reader.finish()
    return decoder


def _refusal(named: list[str], config: Mapping[str, Any]) -> str:
    known = ", ".join(architectures())
    if not named:
        return (
            "config.json names no architecture. Name one with "
            f'hf_overrides={{"architectures": [...]}}; known are {known}.'
        )
    text = f"The architecture {', '.join(named)} is not supported; known are {known}."
    if config.get("auto_map"):
        text += " The model brings its own Python code (auto_map), which Quire never executes."
    return text
