"""Quire: an inference and serving engine for large language models.

The names below are the public interface; each is imported when it is first used, so that `import
quire` costs next to nothing and never loads torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AdapterLogitsProcessor": "quire.runner.sampling",
    "AsyncEngineArgs": "quire.config.args.async_engine_args",
    "AsyncLLM": "quire.engine.async_llm",
    "AsyncLLMEngine": "quire.engine.async_llm",
    "BatchUpdate": "quire.runner.sampling",
    "BeamSearchParams": "quire.params",
    "ClassificationOutput": "quire.pooling_outputs",
    "ClassificationRequestOutput": "quire.pooling_outputs",
    "CompletionOutput": "quire.outputs",
    "EmbeddingOutput": "quire.pooling_outputs",
    "EmbeddingRequestOutput": "quire.pooling_outputs",
    "EmbedsPrompt": "quire.prompts",
    "EngineArgs": "quire.config.args.engine_args",
    "LLM": "quire.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "LoRARequest": "quire.lora.request",
    "LogitsProcessor": "quire.runner.sampling",
    "ModelRegistry": "quire.model_registry",
    "MoveDirectionality": "quire.runner.sampling",
    "PoolingOutput": "quire.pooling_outputs",
    "PoolingParams": "quire.params",
    "PoolingRequestOutput": "quire.pooling_outputs",
    "PromptType": "quire.prompts",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "quire.params",
    "ScoringOutput": "quire.pooling_outputs",
    "ScoringRequestOutput": "quire.pooling_outputs",
    "StructuredOutputsParams": "quire.params",
    "TextPrompt": "quire.prompts",
    "TokensPrompt": "quire.prompts",
    "__version__": "quire.release",
    "__version_tuple__": "quire.release",
    "initialize_ray_cluster": "quire.clusters.ray_cluster",
}

_WITH_TORCH = ("LLM", "LLMEngine")
"""Names of what runs models in this process, as a rule. That is known only after the imports, 0.4 s
of processor time, behind which the loading is hidden: with enable_multiprocessing 0.2 s of another
thread and 60 MB are for nothing.
"""

if TYPE_CHECKING:
    from quire.clusters.ray_cluster import initialize_ray_cluster
    from quire.config.args.async_engine_args import AsyncEngineArgs
    from quire.config.args.engine_args import EngineArgs
    from quire.engine.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.engine.llm_engine import LLMEngine
    from quire.llm import LLM
    from quire.lora.request import LoRARequest
    from quire.model_registry import ModelRegistry
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.params import (
        BeamSearchParams,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from quire.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from quire.release import __version__, __version_tuple__
    from quire.runner.sampling import (
        AdapterLogitsProcessor,
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
    )

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "ModelRegistry",
    "MoveDirectionality",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
    "initialize_ray_cluster",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from quire.unbuilt_names import UNBUILT_NAMES

        hint = UNBUILT_NAMES.get(name)
        why = "" if hint is None else f": this release does not implement it. {hint}"
        raise AttributeError(f"module 'quire' has no attribute {name!r}{why}")
    if home in sys.modules:  # what makes objects old is for imports, not for every access
        return getattr(importlib.import_module(home), name)
    from quire.start_up import quick_imports

    with quick_imports():
        if name in _WITH_TORCH:
            from quire.hardware.torch_library import load_torch_ahead

            load_torch_ahead()
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
