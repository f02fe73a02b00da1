"""Storage of a checkpoint's quantised weights: the `quantization_config`, read as
strictly as the rest of config.json. Free of torch; `models/loading/codes/code_layouts.py` reads the
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import LoadError, UnsupportedConfigValue
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.storage import Storage
from quire.plugins import NameTable, References


def _check_reader(value: object) -> None:
    """Raise TypeError for what cannot read a `quantization_config`."""
    if isinstance(value, type) or not callable(value):
        raise TypeError(
            f"A quantization method is a function that reads a config into a Storage, and {value!r}"
            " is not: a class that computes with vLLM's layers has no counterpart here, see "
            "docs/plugins.md."
        )


METHODS: NameTable[Callable[[ConfigReader], Storage]] = NameTable(
    "quantization method",
    References(
        {
            name: f"quire.models.formats.{module}:read_{name.replace('-', '_')}"
            for name, module in {
                "auto-round": "auto_round",
                "awq": "awq",
                "bitsandbytes": "bitsandbytes",
                "compressed-tensors": "compressed_tensors",
                "fp8": "fp8",
                "gptq": "gptq",
                "hqq": "hqq",
                "mlx": "mlx",
                "modelopt": "fp8",
                "mxfp4": "fp8",
                "quark": "quark",
                "torchao": "torchao",
            }.items()
        }
    ),
    check=_check_reader,
)
"""`quant_method` -> what reads the rest of the object."""

_INSTEAD = (
    "Take a checkpoint of this model in a format of docs/quantization.md, or the unquantised one, "
    "which quantization='int8' or 'int4' rounds while it is loaded."
)

MLX_KEY = "quantization"
"""Key of config.json that mlx-lm writes; it repeats the object as `quantization_config`."""
KEYS = ("quantization_config", "compression_config", MLX_KEY)
"""Keys of config.json, the second in old files of compressed-tensors."""
FILE = "quantization_file"
"""The key of a config for the name of the file that `KEYS[0]` is from, where that is another."""


def read_storage(config: Mapping[str, Any]) -> Storage | None:
    """Storage of quantised weights by a config.json; None where there are none.

    Raises UnsupportedConfigValue, UnknownConfigKey or LoadError for what is not known here.
    """
    try:
        return _read_storage(config)
    except LoadError as error:
        if not isinstance(file := config.get(FILE), str):
            raise
        # the object is another file's, and the message has to name that one
        raise type(error)(str(error).replace("config.json", file, 1)) from None


def _read_storage(config: Mapping[str, Any]) -> Storage | None:
    given = {key: config.get(key) for key in KEYS}
    if given[KEYS[0]] == given[MLX_KEY]:  # mlx-lm writes it twice
        given[KEYS[0]] = None
    reader = ConfigReader(given, is_part=True)
    found = [section for key in KEYS if (section := reader.section(key)) is not None]
    if not found:
        return None
    if "quant_algo" in found[0] or "quantization" in found[0]:
        found[0].supply(quant_method="modelopt")  # whose files need not say it
    if given[MLX_KEY]:
        found[-1].supply(quant_method="mlx")
    if found[0].raw("quant_method", None) == "fp8":
        found[0].supply(expert_dtype=config.get("expert_dtype"))  # DeepSeek-V4 has it outside
    try:
        storage: Storage = found[0].choice("quant_method", METHODS)(found[0])
    except UnsupportedConfigValue as error:
        raise UnsupportedConfigValue(f"{error} {_INSTEAD}") from None
    found[0].finish()
    if len(found) > 1:
        first, second = (key for key in KEYS if given[key])
        raise unsupported(second, given[second], f"null next to {first}")
    return storage
