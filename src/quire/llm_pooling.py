"""Step 1 of 8, offline, for models that pool: `LLM`'s methods that make vectors and labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from quire.engine.frontend.pooling_input import PoolingFacts
from quire.engine.frontend.score_prompts import (
    Content,
    CrossPrompts,
    TextsRead,
    check_uncut,
    has_document_first,
    paired,
)
from quire.engine.llm_engine import LLMEngine
from quire.engine.offline import OfflineBatch, OfflineRequests, one_at_a_time
from quire.errors import InvalidParameter, InvalidType, RequestError
from quire.io_processor import NOT_INSTALLED, TASK, IOProcessor, as_list, make_io_processor
from quire.lora.request import GivenAdapters
from quire.params import PoolingParams
from quire.params.pooling import MOST_READ, TASKS, VECTOR_TASKS
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.prompts import TokensPrompt, as_prompts
from quire.request_options import BatchOptions

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show a progress bar, or a callable that makes one, with `tqdm.tqdm`'s arguments."""
GivenParams: TypeAlias = PoolingParams | Sequence[PoolingParams] | None

_NO_SCORES = "This model does not support the Scoring API."


class PoolingMethods:
    """Methods of an `LLM` whose model pools. One task is served; `pooler_config` may name it."""

    llm_engine: LLMEngine
    _requests: OfflineRequests
    _processor: IOProcessor | None = None
    _lock: threading.RLock

    @one_at_a_time
    def encode(
        self,
        prompts: Any,
        pooling_params: GivenParams = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: GivenAdapters = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each prompt; `outputs.data` is a tensor of torch, fp32.

        Prompts: a str, a list of token ids, a TextPrompt, a TokensPrompt, or a list of these.
        Parameters: one for all, or one each. `tokenization_kwargs` are those of the tokenizer, and
        `truncate_prompt_tokens` (-1: to the model's limit) with `truncation_side`. Raises
        RequestError for a task that is not served, and for an error in a prompt.
        """
        if pooling_task == TASK and (processor := self._io_processor()) is not None:
            return [self._processed(processor, prompts, pooling_params, use_tqdm, lora_request)]
        import torch  # which an engine in another process does not need here

        outputs = self._pooled(
            prompts,
            pooling_params,
            pooling_task,
            use_tqdm,
            BatchOptions(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs),
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
        lora_request: GivenAdapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt; arguments as in `encode`."""
        outputs = self._pooled(
            prompts,
            pooling_params,
            "embed",
            use_tqdm,
            BatchOptions(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs),
        )
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    @one_at_a_time
    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: GivenParams = None,
        lora_request: GivenAdapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Give the labels of each prompt their numbers; arguments as in `encode`."""
        outputs = self._pooled(
            prompts,
            pooling_params,
            "classify",
            use_tqdm,
            BatchOptions(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs),
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    @one_at_a_time
    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: GivenAdapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score each text of `data_2` with the text of `data_1`, or with that in its place.

        With a model of vectors the score is their similarity (the cosine, where the model's files
        name no other), with one of token vectors the sum of each query token's largest product with
        a document's, with one of labels (it has one) the label of the pair. `chat_template`,
        or the engine's, makes a prompt of a pair for the latter. Raises RequestError for unequal
        numbers of texts. A text with pictures is `{"content": [...]}`, whose parts are those of
        chats.
        """
        task = self._pooling.pooler.tasks[0]
        first, second = paired(data_1, data_2)
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            allowed = "it must be one PoolingParams, for all pairs"
            raise InvalidType("pooling_params", pooling_params, allowed)
        params = _of_task(params, task)
        if task == "classify":
            template = chat_template or self.llm_engine.front_end.chat_template
            queries = first * (len(second) // len(first))
            prompts, each = self._cross_prompts(
                queries, second, params, template, tokenization_kwargs
            )
            options = BatchOptions(lora_request=lora_request)
            outputs = self._pooled(prompts, each, task, use_tqdm, options)
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        if task not in VECTOR_TASKS:
            raise InvalidParameter("method", "score", f"the engine serves {task!r}", _NO_SCORES)
        if chat_template is not None:
            allowed = "this model reads each text by itself, without a template"
            raise InvalidParameter("chat_template", chat_template, allowed)
        first, second, params = self._texts_read(first, second, params)
        options = BatchOptions(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        queries = self._pooled(first, params, task, use_tqdm, options)
        queries *= len(second) // len(first)
        each = [
            params if query.error else params.comparing(query.outputs.data) for query in queries
        ]
        documents = self._pooled(second, each, task, use_tqdm, options)
        return [
            _scored(query, document) for query, document in zip(queries, documents, strict=True)
        ]

    def _texts_read(
        self, first: list[Any], second: list[Any], params: PoolingParams
    ) -> tuple[list[Any], list[Any], PoolingParams]:
        """The prompts of texts, or of lists of ids, of which `params` may say how much is read."""
        front_end = self.llm_engine.front_end
        read = TextsRead.of(params, self._pooling, front_end.inputs.limits.max_len)

        def cut(given: Any, which: int) -> Any:
            limit = read.limits[which]
            if isinstance(given, Content):
                check_uncut(limit)
                return front_end.inputs.content_prompt(given.parts)
            if isinstance(given, str):
                return read.cut(front_end.require_tokenizer(), given, which) if limit else given
            return given[:limit] if limit else given

        return [cut(one, 0) for one in first], [cut(one, 1) for one in second], read.params

    def _cross_prompts(
        self,
        first: list[Any],
        second: list[Any],
        params: PoolingParams,
        template: str | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[TokensPrompt], list[PoolingParams]]:
        """A prompt for each pair. Raises RequestError for a model with several labels."""
        facts, front_end = self._pooling, self.llm_engine.front_end
        classifier = facts.pooler.classifier
        if classifier is None or classifier.num_labels != 1:
            raise RequestError("Scoring API is only enabled for num_labels == 1.")
        for one in (*first, *second):
            if not isinstance(one, str | Content):
                raise InvalidType("data_1", one, "pairs are made of texts")
        limit = front_end.inputs.limits.max_len
        make = CrossPrompts(front_end.require_tokenizer(), facts, limit, template)
        pairs = []
        turns = has_document_first(facts, template)
        for sides in zip(first, second, strict=True):
            texts, of_each = self._sides(sides, params)
            pictures = [*of_each[1], *of_each[0]] if turns else [*of_each[0], *of_each[1]]
            prompt, own = make.of(texts[0], texts[1], params, tokenization_kwargs)
            if pictures:
                prompt["multi_modal_data"] = {"image": pictures}
            pairs.append((prompt, own))
        return [prompt for prompt, _ in pairs], [own for _, own in pairs]

    def _io_processor(self) -> IOProcessor | None:
        """The plugin that makes prompts of data, made once."""
        plan = self.llm_engine.vllm_config
        if self._processor is None and plan is not None:
            self._processor = make_io_processor(plan)
        return self._processor

    def _processed(
        self,
        processor: IOProcessor,
        data: Any,
        params: GivenParams,
        use_tqdm: UseTqdm,
        lora_request: GivenAdapters,
    ) -> PoolingRequestOutput[Any]:
        if not isinstance(data, Mapping) or set(data) != {"data"}:
            allowed = "with pooling_task='plugin' it must be {'data': ...}"
            raise InvalidParameter("prompts", data, allowed)
        if isinstance(params, Sequence):
            raise InvalidParameter("pooling_params", params, "it must be one PoolingParams")
        prompts = as_list(processor.pre_process(processor.parse_data(data["data"])))
        outputs = self._pooled(
            prompts,
            processor.merge_pooling_params(params),
            self._pooling.pooler.tasks[0],
            use_tqdm,
            BatchOptions(lora_request=lora_request),
        )
        return PoolingRequestOutput(
            request_id="",
            outputs=processor.post_process(outputs),
            prompt_token_ids=[],
            num_cached_tokens=0,
            finished=True,
        )

    def _sides(
        self, sides: Sequence[str | Content], params: PoolingParams
    ) -> tuple[list[str], list[list[Any]]]:
        """The texts of a pair, with placeholders for their pictures, and the pictures of each."""
        texts, pictures = [], []
        for side in sides:
            if isinstance(side, Content):
                check_uncut(max((params.extra_kwargs or {}).get(name) or 0 for name in MOST_READ))
                inputs = self.llm_engine.front_end.inputs
                text, found = inputs.require_pictures().content(side.parts)
            else:
                text, found = side, []
            texts.append(text)
            pictures.append(found)
        return texts, pictures

    def _pooled(
        self,
        prompts: Any,
        params: GivenParams,
        task: str | None,
        use_tqdm: UseTqdm,
        options: BatchOptions,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        self._check_task(task)
        given = as_prompts(prompts)
        if not given:
            raise InvalidParameter("prompts", prompts, "you must pass at least one prompt")
        batch = OfflineBatch(
            prompts=given,
            total=len(given),
            params=_with_task(params, task),
            options=options,
        )
        return self._requests.run(batch, use_tqdm)

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
            hint = f"Try switching the model's pooling_task via pooler_config={{'task': {task!r}}}."
            raise InvalidParameter("pooling_task", task, f"the engine serves {tasks[0]!r}", hint)
        api, hint = "it", NOT_INSTALLED if task == TASK else ""
        if task in TASKS:
            api, hint = TASKS[task].api, TASKS[task].hint
        else:
            PoolingParams(task=task)  # which knows tasks that are gone
        allowed = f"{api} is not supported by this model, which serves {' and '.join(tasks)}"
        raise InvalidParameter("pooling_task", task, allowed, hint)


def _with_task(given: GivenParams, task: str | None) -> PoolingParams | list[PoolingParams]:
    """Copies of parameters that ask for the task. Raises InvalidParameter for another task."""
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


def _scored(
    query: PoolingRequestOutput[PoolingOutput],
    document: PoolingRequestOutput[PoolingOutput],
) -> ScoringRequestOutput:
    error = query.error or document.error
    return ScoringRequestOutput(
        f"{query.request_id}_{document.request_id}",
        ScoringOutput(0.0 if error else document.outputs.data.item()),
        query.prompt_token_ids + document.prompt_token_ids,
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
        error=error,
    )
