"""`vllm.envs`: the variables that have a meaning here, with the values that they have now."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from quire.as_vllm.variables import HOST, INSTEAD, LOGGING_LEVEL, TRANSLATED, TRUE_ANYWAY
from quire.environment import MAX_N, expanded

_DEFAULTS: dict[str, Any] = {
    HOST: "",
    LOGGING_LEVEL: "INFO",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": False,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CACHE_ROOT": str(expanded("~/.cache/vllm")),
    "VLLM_CONFIGURE_LOGGING": True,
    "VLLM_DO_NOT_TRACK": False,
    "VLLM_ENABLE_V1_MULTIPROCESSING": True,
    "VLLM_LOG_STATS_INTERVAL": 10.0,
    "VLLM_MAX_N_SEQUENCES": MAX_N,
    "VLLM_NO_USAGE_STATS": False,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""Documented defaults; None for all others."""


def _read(name: str) -> Any:
    default, text = _DEFAULTS.get(name), os.environ.get(name)
    if text is None:
        return default
    if isinstance(default, bool):
        return bool(int(text))
    return text if default is None else type(default)(text)


def _reader(name: str) -> Callable[[], Any]:
    return lambda: _read(name)


environment_variables: dict[str, Callable[[], Any]] = {
    name: _reader(name) for name in sorted({*_DEFAULTS, *TRANSLATED, *TRUE_ANYWAY, *INSTEAD})
}
