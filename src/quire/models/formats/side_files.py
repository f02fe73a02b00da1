"""Files of a tool's own that say how a checkpoint is quantised where its config.json does not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from quire.errors import LoadError
from quire.models.formats import FILE, KEYS
from quire.text.json_files import read_plain_json
from quire.text.model_files import has_file

logger = logging.getLogger(__name__)

SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Name of a file -> the method that it is of, unless it says another one."""


def with_side_file(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config`, with the content of the folder's only such file as its `quantization_config` where
    it has none, and the file's name under `FILE`. Raises LoadError where there are several files,
    or it is not plain data.
    """
    if any(config.get(key) for key in KEYS):
        return config
    found = [name for name in SIDE_FILES if has_file(folder / name)]
    if not found:
        return config
    if len(found) > 1:
        raise LoadError(
            f"{folder} has {' and '.join(found)}, and config.json does not say how the weights are "
            "quantised. Remove the one that is not about them."
        )
    logger.info("The description of quantised weights is read from %s.", folder / found[0])
    content = {"quant_method": SIDE_FILES[found[0]]} | read_plain_json(folder / found[0])
    return config | {KEYS[0]: content, FILE: found[0]}
