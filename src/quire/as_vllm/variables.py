"""The environment variables that programs set for vLLM: what becomes of each here.

They are read when `vllm` is first imported, so that a program may set them before that.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_PREFIX = "VLLM_"

TRANSLATED = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "QUIRE_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "QUIRE_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_API_KEY": "QUIRE_API_KEY",
    "VLLM_CACHE_ROOT": "QUIRE_CACHE_DIR",
    "VLLM_CPU_OMP_THREADS_BIND": "QUIRE_CPU_THREADS_BIND",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "QUIRE_LORA_RESOLVER_CACHE_DIR",
    "VLLM_LOG_STATS_INTERVAL": "QUIRE_LOG_STATS_INTERVAL",
    "VLLM_MAX_N_SEQUENCES": "QUIRE_MAX_N_SEQUENCES",
    "VLLM_PLUGINS": "QUIRE_PLUGINS",
    "VLLM_PP_LAYER_PARTITION": "QUIRE_PP_LAYER_PARTITION",
    "VLLM_RAY_BUNDLE_INDICES": "QUIRE_RAY_BUNDLE_INDICES",
    "VLLM_RAY_DP_PACK_STRATEGY": "QUIRE_RAY_DP_PACK_STRATEGY",
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS": "QUIRE_RAY_DP_PLACEMENT_NODE_IPS",
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "QUIRE_RAY_EXTRA_ENV_VARS_TO_COPY",
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "QUIRE_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
}
"""Variables that have another name here. One that is set under ours already keeps its value."""

LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
"""Variable that becomes the level of the logger `quire`, here and in the engine's processes."""

HOST = "VLLM_HOST_IP"
"""Variable with the address that `get_ip()` gives (stand_ins.py)."""

TRUE_ANYWAY = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_MODELSCOPE": "0",
    "VLLM_USE_V1": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Variables and the value that is true here anyway, or for `LLM`: nothing needs to be done."""

INSTEAD = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "give hf_overrides={'max_position_embeddings': ...}",
    "VLLM_ATTENTION_BACKEND": "the provider of attention is chosen by what it supports",
    "VLLM_BATCH_INVARIANT": "answers do not depend on the batch, and cannot be made to",
    "VLLM_CONFIGURE_LOGGING": "give the logger 'quire' a handler with the module logging",
    "VLLM_CPU_KVCACHE_SPACE": "give kv_cache_memory_bytes",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "give cpu_threads",
    "VLLM_DP_RANK": "give data_parallel_size, with which an engine starts its copies itself",
    "VLLM_DP_SIZE": "give data_parallel_size, with which an engine starts its copies itself",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "give LLM or LLMEngine enable_multiprocessing=True",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "how long a step may take follows from measured steps",
    "VLLM_SERVER_DEV_MODE": "give quire serve --enable-admin and --api-key",
    "VLLM_TARGET_DEVICE": "the device is found, or chosen by the option device",
    "VLLM_USE_MODELSCOPE": "give the folder of the model",
    "VLLM_USE_V1": "there is one engine",
    "VLLM_WORKER_MULTIPROC_METHOD": "processes are always fresh interpreters",
}
"""Variables that are reported with what to do instead, where their value is not the one above."""

_WORDS = {"true": "1", "false": "0"}
"""Other spellings of a variable that allows something."""
_HERE = Path(__file__).parent

_INTERPRETER = "AS_VLLM_PYTHON"
"""Variable with the interpreter that child_bin/vllm runs."""

logger = logging.getLogger(__name__)


def read_variables() -> None:
    """Translate what has a meaning, and warn once of each variable that has none. Raises ValueError
    for a key that would be read as several.
    """
    for theirs, ours in TRANSLATED.items():
        if theirs in os.environ:
            os.environ.setdefault(ours, _translated(theirs, ours))
    if LOGGING_LEVEL in os.environ:
        logging.getLogger("quire").setLevel(os.environ[LOGGING_LEVEL].upper())
    known = {LOGGING_LEVEL, HOST, *TRANSLATED}
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        value = os.environ[name]
        if name not in known and value != TRUE_ANYWAY.get(name):
            instead = INSTEAD.get(name, "it means nothing here")
            logger.warning("%s=%s has no effect: %s.", name, value, instead)


def _translated(theirs: str, ours: str) -> str:
    given = os.environ[theirs]
    if theirs == "VLLM_API_KEY" and "," in given:
        raise ValueError(f"{theirs} has a comma, which {ours} cannot hold; give --api-key.")
    if theirs.startswith("VLLM_ALLOW_"):
        return _WORDS.get(given.strip().lower(), given)
    return given


def name_for_children() -> None:
    """Have the Python processes that this one starts import quire.as_vllm before all else, by
    child_site/sitecustomize.py in PYTHONPATH, and find the command `vllm`, in child_bin, in PATH.
    """
    os.environ[_INTERPRETER] = sys.executable
    for variable, folder, default in (
        ("PYTHONPATH", "child_site", ""),
        ("PATH", "child_bin", os.defpath),
    ):
        first = str(_HERE / folder)
        others = os.environ.get(variable, default).split(os.pathsep)
        rest = (path for path in others if path and path != first)
        os.environ[variable] = os.pathsep.join([first, *rest])
