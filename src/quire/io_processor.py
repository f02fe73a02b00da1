"""Plugins that make prompts of data and data of what the model pools from them: the group
`io_processor_plugins`, of which the option io_processor_plugin or else config.json names one.

They run in the front end: `LLM.encode({"data": ...}, pooling_task="plugin")`, and `data` of
`POST /pooling`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from quire.errors import InvalidParameter, PluginError, RequestError
from quire.params import PoolingParams
from quire.plugins import load_group, resolve_reference

OPTION = "io_processor_plugin"
TASK = "plugin"
"""The task of requests whose data a plugin processes."""
NOT_INSTALLED = "No IOProcessor plugin installed."


class IOProcessor(ABC):
    """Makes prompts of a request's data, and a reply of their results; one serves all requests."""

    def __init__(self, vllm_config: Any, renderer: Any = None) -> None:
        """vllm_config: the engine's plan. renderer: always None."""
        self.vllm_config = vllm_config

    def parse_data(self, data: Any) -> Any:
        """The data of a request, checked. Raises ValueError for data that cannot be processed."""
        return data

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        """The prompt of parsed data, or a list of several: texts, lists of token ids, or dicts."""

    @abstractmethod
    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """The reply, of the prompts' `PoolingRequestOutput`s in order; for a server, JSON."""

    async def pre_process_async(
        self, prompt: Any, request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """`pre_process`, as a server calls it."""
        return self.pre_process(prompt, request_id=request_id, **kwargs)

    async def post_process_async(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """`post_process`, as a server calls it."""
        return self.post_process(model_output, request_id=request_id, **kwargs)

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """The parameters of the prompts, where a request gives these."""
        return params or PoolingParams()


def find_io_processor(name: str) -> type[IOProcessor]:
    """The class of a plugin. Raises InvalidParameter for a name that leads to no plugin."""
    found = load_group("io_processor_plugins")
    if name not in found:
        installed = ", ".join(sorted(found)) or "none is"
        hint = f"Where config.json names it, hf_overrides={{{OPTION!r}: None}} does without."
        raise InvalidParameter(OPTION, name, f"it must be installed, and {installed}", hint)
    try:
        kind = resolve_reference(found[name]())
    except PluginError as error:
        raise InvalidParameter(OPTION, name, str(error)) from error
    except Exception as error:
        what = f"its plugin failed: {type(error).__name__}: {error}"
        raise InvalidParameter(OPTION, name, what) from error
    if not (isinstance(kind, type) and issubclass(kind, IOProcessor)):
        allowed = "its plugin must name a subclass of quire.io_processor.IOProcessor"
        raise InvalidParameter(OPTION, name, allowed)
    return kind


def make_io_processor(plan: Any) -> IOProcessor | None:
    """The processor of an engine; None where its plan names none. Raises InvalidParameter."""
    name = plan.serving.io_processor_plugin
    return None if name is None else find_io_processor(name)(plan, None)


def needed(processor: IOProcessor | None, parameter: str = "task") -> IOProcessor:
    """The processor. Raises RequestError for this parameter where there is none."""
    if processor is None:
        raise RequestError(NOT_INSTALLED, parameter=parameter, value=TASK)
    return processor


def as_list(prompts: Any) -> list[Any]:
    """The prompts of `pre_process`: a list of token ids is one."""
    is_several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if is_several and not (prompts and isinstance(prompts[0], int)):
        return list(prompts)
    return [prompts]
