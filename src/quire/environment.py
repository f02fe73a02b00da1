"""The environment variables that Quire reads: all of them, with type and meaning.

They are for debugging and for places; what changes answers or speed is an argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quire.errors import InvalidParameter

_PREFIX = "QUIRE_"

_CARRIED = (
    *("QUIRE_", "VLLM_", "HF_", "HUGGING_FACE_", "TRITON_", "TORCH_", "NCCL_", "GLOO_", "UCX_"),
    *("PYTHONHASHSEED", "OMP_NUM_THREADS"),
)
"""The beginnings of variables that processes on other machines are given."""
_LOCAL = frozenset({
    *("QUIRE_CLUSTER_SECRET", "QUIRE_API_KEY", "QUIRE_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR"),
    *("HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN_PATH"),
    *("VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_API_KEY", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
})  # fmt: skip
"""Variables that are another machine's own affair, and keys that cores do not need."""
MAX_N = 16384
"""The most completions of a request where QUIRE_MAX_N_SEQUENCES is not set."""


class Variable(msgspec.Struct, frozen=True):
    """One variable: its form and what it is for."""

    name: str
    form: str
    help: str


VARIABLES = (
    Variable("QUIRE_DEBUG", "0 or 1", "Show the traceback of an error on the command line."),
    Variable(
        "QUIRE_CACHE_DIR",
        "a folder",
        "For packed weights (`packed_weights_gib`), random checkpoints of `quire bench`, and "
        "weights that do not fit in memory; default ~/.cache/quire.",
    ),
    Variable(
        "QUIRE_CPU_ISA",
        "an instruction set",
        "The native kernels to run, one of those that `quire doctor` lists; default the fastest "
        "(`avx512_vnni` rather than `avx512_bf16` on processors with AMX).",
    ),
    Variable(
        "QUIRE_LOG_STATS_INTERVAL",
        "seconds",
        "Between two lines of statistics in the log; default 10.",
    ),
    Variable(
        "QUIRE_API_KEY",
        "keys with commas between",
        "Keys that `quire serve` accepts, in addition to those of --api-key.",
    ),
    Variable(
        "QUIRE_ALLOW_RUNTIME_LORA_UPDATING",
        "0 or 1",
        "Let clients of `quire serve --enable-lora` load adapters from folders of the server.",
    ),
    Variable(
        "QUIRE_LORA_RESOLVER_CACHE_DIR",
        "a folder",
        "With that, folders of adapters in it are loaded when a request names them.",
    ),
    Variable(
        "QUIRE_MAX_N_SEQUENCES",
        "an integer >= 1",
        "The most completions of a request (n), and beams; default 16384.",
    ),
    Variable(
        "QUIRE_ALLOW_INSECURE_SERIALIZATION",
        "0 or 1",
        "Let `collective_rpc` and `apply_model` send functions to cores in other processes, by "
        "cloudpickle: whoever reaches a core's socket can then run code in it.",
    ),
    Variable(
        "QUIRE_CLUSTER_SECRET",
        "16 characters or more",
        "What a front end and headless cores on other machines know; all others are refused.",
    ),
    Variable("QUIRE_IMAGE_FETCH_TIMEOUT", "seconds", "For the first try of a picture; default 5."),
    Variable(
        "QUIRE_MAX_MEDIA_DOWNLOAD_SIZE_MB",
        "an integer >= 1",
        "The most MiB of one picture, wherever it comes from; default 256.",
    ),
    Variable(
        "QUIRE_MAX_IMAGE_PIXELS", "an integer >= 1", "The most of a picture; default 178956970."
    ),
    Variable(
        "QUIRE_MEDIA_LOADING_THREAD_COUNT",
        "an integer >= 1",
        "How many pictures of a request are fetched at once; default 8.",
    ),
    Variable(
        "QUIRE_MEDIA_URL_ALLOW_REDIRECTS",
        "0 or 1",
        "Whether redirects of pictures' URLs are followed; default 1.",
    ),
    Variable(
        "QUIRE_MEDIA_ALLOW_PRIVATE",
        "0 or 1",
        "Fetch pictures from addresses that are not of the public internet, too: whoever may ask "
        "the server can then read what is in its network.",
    ),
    Variable(
        "QUIRE_MEDIA_USE_PROXIES",
        "0 or 1",
        "Fetch pictures by http_proxy and https_proxy, which then decide what may be reached.",
    ),
    Variable(
        "QUIRE_PLUGINS",
        "names with commas between",
        "The plugins of installed packages that are loaded; not set: all, empty: none "
        "(docs/plugins.md). Without it, VLLM_PLUGINS is read.",
    ),
    Variable("VLLM_PLUGINS", "names with commas between", "The same where QUIRE_PLUGINS is unset."),
    Variable(
        "QUIRE_PLUGIN_TIMEOUT",
        "seconds",
        "For a plugin to be imported and called; one that takes longer is left out. Default 60.",
    ),
    Variable(
        "QUIRE_RAY_DP_PACK_STRATEGY",
        "strict or fill",
        "How Ray's machines are filled with cores: with exactly --data-parallel-size-local each "
        "(strict, the default), or with as many as there is room for.",
    ),
    Variable(
        "QUIRE_RAY_DP_PLACEMENT_NODE_IPS",
        "addresses with commas between",
        "The machines of a Ray cluster that cores are put on; default: all.",
    ),
    Variable(
        "QUIRE_RAY_BUNDLE_INDICES",
        "numbers with commas between",
        "The bundles of the Ray placement group that workers take, in their order.",
    ),
    Variable(
        "QUIRE_RAY_EXTRA_ENV_VARS_TO_COPY",
        "names with commas between",
        "Variables that processes on other machines of a Ray cluster get besides those of "
        "Quire, the hub and the kernels' libraries.",
    ),
    Variable(
        "QUIRE_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
        "beginnings of names with commas between",
        "The same for all variables that begin like this.",
    ),
    Variable("RAY_ADDRESS", "host:port", "The Ray cluster; default: one of this machine."),
    Variable(
        "QUIRE_PP_LAYER_PARTITION",
        "numbers with commas between",
        "The layers of each stage (`pipeline_parallel_size`); default equal shares.",
    ),
    Variable(
        "QUIRE_CPU_THREADS_BIND",
        "auto, nobind, or lists of CPUs with | between",
        "The logical CPUs of each worker's threads: `0-15|16-31`; default auto, the cores of a "
        "NUMA node for each.",
    ),
    Variable(
        "OPENAI_API_KEY",
        "a key",
        "What `quire chat --url` and `quire complete --url` send where --api-key is not given.",
    ),
    Variable("OPENAI_BASE_URL", "a URL", "Where those ask when --url has no value."),
    Variable("OMP_NUM_THREADS", "an integer >= 1", "At most this many threads compute."),
)


class MediaEnvironment(msgspec.Struct, frozen=True):
    """Settings for fetching pictures, and their largest sizes. `proxies`: by scheme."""

    timeout_s: float
    max_bytes: int
    max_pixels: int | None
    num_at_once: int
    allows_redirects: bool
    allows_private: bool
    proxies: dict[str, str]


class PluginEnvironment(msgspec.Struct, frozen=True):
    """Settings for plugins: `names` of those that are loaded, None for all."""

    names: frozenset[str] | None
    timeout_s: float


class RayEnvironment(msgspec.Struct, frozen=True):
    """Settings for Ray: how cores are put on machines, the addresses of these (none: all), the
    bundles of a placement group that workers take (None: the first), and the cluster's address.
    """

    pack_strategy: str
    node_ips: tuple[str, ...]
    bundle_indices: tuple[int, ...] | None
    address: str | None


class Environment(msgspec.Struct, frozen=True):
    """The variables' values, read once."""

    debug: bool
    cache_dir: Path
    thread_limit: int | None
    cpu_isa: str | None
    log_stats_interval_s: float
    api_keys: tuple[str, ...]
    """Keys as they were written: one may be empty."""
    may_load_adapters: bool
    may_send_functions: bool
    max_n: int
    adapter_folder: Path | None
    cluster_secret: str | None
    media: MediaEnvironment
    openai_api_key: str | None
    openai_base_url: str | None
    unknown: tuple[str, ...]
    """Names that begin like ours and mean nothing."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The values in `environ`, or the process's. Raises InvalidParameter for another form."""
    given = os.environ if environ is None else environ
    known = {variable.name for variable in VARIABLES}
    return Environment(
        debug=_flag(given, "QUIRE_DEBUG"),
        cache_dir=Path(given.get("QUIRE_CACHE_DIR") or Path.home() / ".cache" / "quire"),
        thread_limit=_count(given, "OMP_NUM_THREADS"),
        cpu_isa=given.get("QUIRE_CPU_ISA") or None,
        log_stats_interval_s=_seconds(given, "QUIRE_LOG_STATS_INTERVAL", 10.0),
        api_keys=tuple(given["QUIRE_API_KEY"].split(",") if "QUIRE_API_KEY" in given else ()),
        may_load_adapters=_flag(given, "QUIRE_ALLOW_RUNTIME_LORA_UPDATING"),
        may_send_functions=_flag(given, "QUIRE_ALLOW_INSECURE_SERIALIZATION"),
        max_n=_count(given, "QUIRE_MAX_N_SEQUENCES") or MAX_N,
        adapter_folder=_folder(given, "QUIRE_LORA_RESOLVER_CACHE_DIR"),
        cluster_secret=given.get("QUIRE_CLUSTER_SECRET") or None,
        media=_media(given),
        openai_api_key=given.get("OPENAI_API_KEY") or None,
        openai_base_url=given.get("OPENAI_BASE_URL") or None,
        unknown=tuple(sorted(n for n in given if n.startswith(_PREFIX) and n not in known)),
    )


def _media(given: Mapping[str, str]) -> MediaEnvironment:
    schemes = ("http", "https") if _flag(given, "QUIRE_MEDIA_USE_PROXIES") else ()
    proxies = {each: given.get(f"{each}_proxy") for each in schemes}
    return MediaEnvironment(
        timeout_s=_seconds(given, "QUIRE_IMAGE_FETCH_TIMEOUT", 5.0),
        max_bytes=(_count(given, "QUIRE_MAX_MEDIA_DOWNLOAD_SIZE_MB") or 256) * 2**20,
        max_pixels=_count(given, "QUIRE_MAX_IMAGE_PIXELS"),
        num_at_once=_count(given, "QUIRE_MEDIA_LOADING_THREAD_COUNT") or 8,
        allows_redirects=_flag(given, "QUIRE_MEDIA_URL_ALLOW_REDIRECTS", "1"),
        allows_private=_flag(given, "QUIRE_MEDIA_ALLOW_PRIVATE"),
        proxies={scheme: proxy for scheme, proxy in proxies.items() if proxy},
    )


def _flag(given: Mapping[str, str], name: str, default: str = "0") -> bool:
    text = given.get(name, default)
    if text not in ("", "0", "1"):
        raise InvalidParameter(name, text, "0 or 1")
    return text == "1"


def _folder(given: Mapping[str, str], name: str) -> Path | None:
    text = given.get(name)
    return expanded(text).absolute() if text else None


def expanded(path: str | Path) -> Path:
    """`path` with `~` and `~user` at its beginning expanded, as a shell does: an unknown user's, or
    one without a home, stays as it is. (`Path.expanduser` raises RuntimeError for these.)
    """
    return Path(os.path.expanduser(path))


def _count(given: Mapping[str, str], name: str) -> int | None:
    text = (
        given.get(name, "").split(",")[0].strip()
    )  # OpenMP allows a list; the outer level is ours
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidParameter(name, text, "an integer >= 1")
    return int(text)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidParameter(name, text, "a number of seconds above 0")
    return seconds


def read_plugin_environment() -> PluginEnvironment:
    """Settings for plugins, as the environment says now. Raises InvalidParameter."""
    text = os.environ.get("QUIRE_PLUGINS", os.environ.get("VLLM_PLUGINS"))
    names = None if text is None else frozenset(filter(None, map(str.strip, text.split(","))))
    return PluginEnvironment(names, _seconds(os.environ, "QUIRE_PLUGIN_TIMEOUT", 60.0))


def carried_environment() -> dict[str, str]:
    """The variables that processes on other machines are given: settings of ours, of the kernels'
    libraries and of the hub, and what QUIRE_RAY_EXTRA_ENV_VARS_TO_COPY and
    QUIRE_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY name; neither addresses nor keys of this machine,
    except for the token of the hub, from which they read models.
    """
    names = _names(os.environ, "QUIRE_RAY_EXTRA_ENV_VARS_TO_COPY")
    prefixes = _names(os.environ, "QUIRE_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names
        or name.startswith(prefixes)
        or (name.startswith(_CARRIED) and name not in _LOCAL)
    }


def take_environment(carried: Mapping[str, str]) -> None:
    """Set the variables of another machine that are not set here."""
    for name, value in carried.items():
        os.environ.setdefault(name, value)


def protect_new_ray_cluster() -> None:
    """Have a Ray cluster that this process starts report nothing to others, unless that is set."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def ray_asks_for_token() -> bool:
    """Whether the cluster that this process has started lets in only who has its token, or whether
    that was turned off: Ray says so to the processes that it starts.
    """
    return os.environ.get("RAY_AUTH_MODE") is not None


def read_ray_environment() -> RayEnvironment:
    """Settings for Ray, as the environment says now. Raises InvalidParameter."""
    strategy = os.environ.get("QUIRE_RAY_DP_PACK_STRATEGY", "strict")
    if strategy not in ("strict", "fill"):
        allowed = "strict or fill: a core is on one machine"
        raise InvalidParameter("QUIRE_RAY_DP_PACK_STRATEGY", strategy, allowed)
    return RayEnvironment(
        strategy,
        _names(os.environ, "QUIRE_RAY_DP_PLACEMENT_NODE_IPS"),
        _bundles(os.environ, "QUIRE_RAY_BUNDLE_INDICES"),
        os.environ.get("RAY_ADDRESS") or None,
    )


def _names(given: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, given.get(name, "").split(","))))


def _bundles(given: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    texts = _names(given, name)
    if any(not text.isascii() or not text.isdigit() for text in texts):
        raise InvalidParameter(name, given[name], "numbers with commas between")
    if len(set(texts)) < len(texts):
        raise InvalidParameter(name, given[name], "each bundle once")
    return tuple(map(int, texts)) or None


class RankEnvironment(msgspec.Struct, frozen=True):
    """Settings of a core's workers: each stage's layers (None: equal), CPUs as written."""

    stage_layers: tuple[int, ...] | None
    threads_bind: str


def read_rank_environment() -> RankEnvironment:
    """Settings for workers, as the environment says now. Raises InvalidParameter."""
    name = "QUIRE_PP_LAYER_PARTITION"
    text, layers = os.environ.get(name), None
    if text is not None:
        words = text.split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise InvalidParameter(name, text, "numbers of layers with commas between")
        layers = tuple(map(int, words))
    return RankEnvironment(layers, os.environ.get("QUIRE_CPU_THREADS_BIND") or "auto")


def max_sequences() -> int:
    """The most completions that a request may ask for, as the environment says now."""
    return _count(os.environ, "QUIRE_MAX_N_SEQUENCES") or MAX_N


def may_send_functions() -> bool:
    """Whether functions travel between processes, as the environment says now."""
    return _flag(os.environ, "QUIRE_ALLOW_INSECURE_SERIALIZATION")


_OF_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


def launcher_variables() -> dict[str, str]:
    """The variables that torchrun and launchers like it set for each of their processes."""
    return {name: os.environ[name] for name in _OF_LAUNCHERS if name in os.environ}
