"""Step 1 of 8, offline, for models that pool: `LLM`'s methods that make vectors and labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast, get_args

import numpy as np

from quire.engine.frontend.pooling_input import PoolingFacts
from quire.engine.llm_engine import LLMEngine
from quire.engine.offline import OfflineRequests
from quire.errors import InvalidParameter, InvalidType, RequestError
from quire.models.pooler_spec import PoolingTask
from quire.params import PoolingParams
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)
from quire.prompts import as_prompts

P = ParamSpec("P")
T = TypeVar("T")

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show a progress bar, or a callable that makes one, with `tqdm.tqdm`'s arguments."""
GivenParams: TypeAlias = PoolingParams | Sequence[PoolingParams] | None

_HINTS = {
    "embed": "Start it with convert='embed', or a model of vectors.",
    "classify": "Start it with convert='classify', or a model of labels.",
}


def one_at_a_time(method: Callable[P, T]) -> Callable[P, T]:
    """Have calls from other threads wait until the method returns; its own may use `self` again,
    but not while the engine works (engine/offline.py).
    """

    @wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        llm = cast(PoolingMethods, args[0])
        with llm._lock:
            llm._requests.require_idle()
            return method(*args, **kwargs)

    return alone


class PoolingMethods:
    """The methods of an `LLM` whose model pools prompts. One task is served; `pooler_config` may
    name it.
    """

    llm_engine: LLMEngine
    _requests: OfflineRequests
    _lock: threading.RLock

    @one_at_a_time
    def encode(
        self,
        prompts: Any,
        pooling_params: GivenParams = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each prompt; `outputs.data` is a tensor of torch, fp32.

        Prompts: a str, a list of token ids, a TextPrompt, a TokensPrompt, or a list of these.
        Parameters: one for all, or one each. `tokenization_kwargs` are those of the tokenizer, and
        `truncate_prompt_tokens` (-1: to the model's limit) with `truncation_side`. Raises
        RequestError for a task that is not served, and for an error in a prompt.
        """
        import torch  # which an engine in another process does not need here

        outputs = self._pooled(
            prompts, pooling_params, pooling_task, use_tqdm, lora_request, tokenization_kwargs
        )
        for output in outputs:
            output.outputs = PoolingOutput(torch.from_numpy(np.array(output.outputs.data)))
        return outputs

    @one_at_a_time
    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: GivenParams = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt; arguments as in `encode`."""
        outputs = self._pooled(
            prompts, pooling_params, "embed", use_tqdm, lora_request, tokenization_kwargs
        )
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    @one_at_a_time
    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: GivenParams = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Give the labels of each prompt their numbers; arguments as in `encode`."""
        outputs = self._pooled(
            prompts, pooling_params, "classify", use_tqdm, lora_request, tokenization_kwargs
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def _pooled(
        self,
        prompts: Any,
        params: GivenParams,
        task: str | None,
        use_tqdm: UseTqdm,
        lora_request: Any,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        self._check_task(task)
        given = as_prompts(prompts)
        if not given:
            raise InvalidParameter("prompts", prompts, "you must pass at least one prompt")
        ids = self._requests.enqueue(
            given,
            len(given),
            _with_task(params, task),
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self._requests.outputs(ids, use_tqdm)

    @property
    def _pooling(self) -> PoolingFacts:
        """The pooler of the model. Raises RequestError where there is none."""
        facts = self.llm_engine.front_end.inputs.limits.pooling
        if facts is None:
            raise RequestError(
                "encode(), embed(), classify() and score() are only supported for pooling models. "
                "Start the engine with runner='pooling', or a model that pools."
            )
        return facts

    def _check_task(self, task: str | None) -> None:
        """Raise RequestError unless the task is the one that is served."""
        tasks = self._pooling.pooler.tasks
        if task is None:
            allowed = f"it must be given, and this model serves {tasks[0]!r}"
            raise InvalidParameter("pooling_task", None, allowed)
        if task == tasks[0]:
            return
        if task in tasks:
            hint = f"Start it with pooler_config={{'task': {task!r}}}."
            raise InvalidParameter("pooling_task", task, f"the engine serves {tasks[0]!r}", hint)
        allowed = f"this model does not support it, but {', '.join(tasks)}"
        if task not in get_args(PoolingTask):
            PoolingParams(task=task)  # which knows tasks that are gone
        raise InvalidParameter("pooling_task", task, allowed, _HINTS.get(task, ""))


def _with_task(given: GivenParams, task: str | None) -> PoolingParams | list[PoolingParams]:
    """Copies of the parameters that ask for the task. Raises InvalidParameter where they ask for
    another one.
    """
    if given is None:
        return PoolingParams(task=task)
    if isinstance(given, list | tuple):
        return [_of_task(one, task) for one in given]
    return _of_task(given, task)


def _of_task(given: object, task: str | None) -> PoolingParams:
    if not isinstance(given, PoolingParams):
        raise InvalidType("pooling_params", given, "it must be a PoolingParams, or a list of them")
    if given.task not in (None, task):
        raise InvalidParameter("task", given.task, f"this call asks for {task!r}")
    own = given.clone()
    own.task = task
    own.validate()
    return own
