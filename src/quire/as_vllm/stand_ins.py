"""Small things of vLLM's that programs import beside the engine, done with what is at hand."""

from __future__ import annotations

import enum
import gc
import itertools
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.as_vllm.variables import HOST
from quire.plugins import GROUPS, load_group
from quire.prompts import TokensPrompt

if TYPE_CHECKING:
    from quire.config.plan import EnginePlan
    from quire.config.views.model import ModelView
    from quire.executor.abstract import Executor

TokenizerLike: TypeAlias = Any
"""A tokenizer of transformers, or Quire's."""


class UsageContext(enum.StrEnum):
    """Maker of an engine; for reports of usage, which are never sent."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class CompilationMode(enum.IntEnum):
    """Values of `compilation_config`'s mode; none of them changes anything."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """Values of `compilation_config`'s cudagraph_mode."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


class Numbering:
    """Gives the integers from `start` on, one for each `next()`."""

    def __init__(self, start: int = 0) -> None:
        self._numbers = itertools.count(start)

    def __next__(self) -> int:
        return next(self._numbers)

    def reset(self) -> None:
        """Begin at 0 again."""
        self._numbers = itertools.count()


class ExecutorChoice:
    """The base class of executors, of which programs ask one thing."""

    @staticmethod
    def get_class(vllm_config: EnginePlan) -> type[Executor]:
        """The class of the executor that a plan names."""
        from quire.executor.backends import executor_class_of

        return executor_class_of(vllm_config)


class ShardedFiles:
    """Names that files of save_sharded_state may have."""

    TP_ONLY_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


class DeviceKind:
    """Device of models in this process: an NVIDIA device if torch sees one, else the CPU."""

    @property
    def device_type(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def _is_other(self) -> bool:
        return False

    is_rocm = is_tpu = is_xpu = is_out_of_tree = _is_other


current_platform = DeviceKind()


def init_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def get_ip() -> str:
    """The address by which others reach this machine: that of VLLM_HOST_IP, else of the interface
    that leads outside, else the loopback.
    """
    if HOST in os.environ:
        return os.environ[HOST]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address belongs to nobody
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Let Python collect engines that are no longer referred to; they give their memory back."""
    gc.collect()


def nothing_to_destroy() -> None:
    """There are no groups of processes to destroy."""


def load_plugins_by_group(group: str) -> dict[str, Any]:
    """Installed plugins of one of the groups, by name. Raises ValueError for another group."""
    name = group.partition(".")[2]
    if name not in GROUPS:
        known = ", ".join(f"vllm.{each}" for each in GROUPS)
        raise ValueError(f"There is no group {group!r} of plugins: {known}.")
    return load_group(name)


def token_inputs(
    prompt_token_ids: list[int], prompt: str | None = None, cache_salt: str | None = None
) -> TokensPrompt:
    """A prompt of token ids."""
    made = TokensPrompt(prompt_token_ids=prompt_token_ids)
    if prompt is not None:
        made["prompt"] = prompt
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made


def load_chat_template(
    chat_template: str | os.PathLike[str] | None, *, is_literal: bool = False
) -> str | None:
    """A template's text, of a file or given itself. Raises ValueError for a missing file."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    path = os.fspath(chat_template)
    if not any(mark in path for mark in "{}\n"):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except OSError as error:
            raise ValueError(f"The chat template {path!r} cannot be read: {error}") from error
    # command lines write the ends of lines so
    return path.replace("\\n", "\n")


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the beginning of a vector, and how long it is."""
    more = ", ..." if len(embeds) > 4 else ""
    first = ", ".join(str(value) for value in embeds[:4])
    sys.stdout.write(f"{prefix}: [{first}{more}] (size={len(embeds)})\n")


def get_tokenizer(
    tokenizer_name: str,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """The tokenizer of a folder or a hub id as transformers makes it, with all its methods. No code
    of the folder is run, whatever `trust_remote_code` is.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        tokenizer_name,
        *args,
        use_fast=tokenizer_mode != "slow",
        trust_remote_code=False,
        revision=revision,
        cache_dir=download_dir,
        **kwargs,
    )


def tokenizer_of(model_config: ModelView, **options: Any) -> Any:
    """The tokenizer of an engine's model as transformers makes it; None for an engine without."""
    folder = model_config.tokenizer
    return None if folder is None else get_tokenizer(folder, **options)


def get_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> Any:
    """The config.json of a folder or a hub id as transformers reads it; no code of the folder is
    run, whatever `trust_remote_code` is.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=False, revision=revision, **options)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: list[Any] | None, **options: Any
) -> str | None:
    """The text of the template that chats are rendered with: the one given (or the tokenizer's of
    that name), else the tokenizer's own; None where it has none. `options` are of the model.
    """
    try:
        text: str = tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:  # none of that name, or none at all
        return chat_template
    return text


class GroupOfOne:
    """The workers that a connector of K/V sees: itself."""

    rank = rank_in_group = local_rank = first_rank = last_rank = 0
    world_size = 1
    ranks = (0,)
    is_first_rank = is_last_rank = True


def group_of_one() -> GroupOfOne:
    """The group of a worker that shares its model with nobody: connectors serve no other."""
    return GroupOfOne()
