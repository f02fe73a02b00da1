"""Step 1 of 8, offline: `LLM` takes prompts and gives texts.

In: prompts and parameters as Python values. Out: one `RequestOutput` per prompt. Next:
engine/frontend/input_processor.py.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from quire.beam_search import BeamSearchOutput
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import default_of, fields_of
from quire.engine.beam_runner import BeamRunner
from quire.engine.control_verbs import BlockingControl
from quire.engine.llm_engine import LLMEngine
from quire.engine.offline import OfflineBatch, OfflineRequests, one_at_a_time
from quire.engine.wire.control_calls import Utility
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, RequestError
from quire.llm_pooling import PoolingMethods, UseTqdm
from quire.lora.request import GivenAdapters
from quire.observability.metrics import Metric
from quire.outputs import RequestOutput
from quire.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.pooling_outputs import PoolingRequestOutput
from quire.prompts import as_prompts, with_processor_kwargs
from quire.request_options import BatchOptions
from quire.text.encode_options import encode_options
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.config.views.model import ModelView
    from quire.engine.frontend.input_processor import InputProcessor

T = TypeVar("T")
OutputKind = TypeVar("OutputKind", bound="RequestOutput | PoolingRequestOutput[Any]")


class LLM(BlockingControl, PoolingMethods):
    """A model for offline use: `generate` and `chat` block until all prompts are answered.

    `model` is a folder or a hub id; None is the small model inside the package. Further keywords
    are the fields of `EngineArgs`. `sleep`, `collective_rpc` and the like are verbs
    (engine/control_verbs.py). Use it as a context manager, or call `close()`, to release its
    memory. Raises RequestError for an invalid keyword or value, LoadError for a model that cannot
    be loaded.

    Calls from several threads run one after the other; for one batch, pass all prompts in one call.
    A process that was forked from this one makes an `LLM` of its own where the core is in another
    process.
    """

    def __init__(
        self, model: str | None = None, *, enable_multiprocessing: bool = False, **engine_args: Any
    ) -> None:
        """`enable_multiprocessing` runs the core in a process of its own. A crash there, or running
        out of memory, does not end this process; but `apply_model` and functions for
        `collective_rpc` then need QUIRE_ALLOW_INSECURE_SERIALIZATION=1.
        """
        engine_args.setdefault("disable_log_stats", True)
        args = EngineArgs(model=model, **engine_args)
        engine = LLMEngine.from_engine_args(args, enable_multiprocessing=enable_multiprocessing)
        self._connect(engine)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build the engine from `EngineArgs`. Raises NotBuiltYet for `enable_log_requests`."""
        given = dict(vars(engine_args))
        if given.pop("enable_log_requests", False):
            hint = "Requests are logged by AsyncLLM and servers."
            raise NotBuiltYet("enable_log_requests", True, hint)
        return cls(**given)

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Wrap an existing engine in the offline interface; closing this closes the engine."""
        llm = cls.__new__(cls)
        llm._connect(engine)
        return llm

    def _connect(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        plan = engine.front_end.plan
        if plan is not None and (name := plan.sampling.structured_outputs.reasoning_parser):
            from quire.server.output_parsing import FormsAfterReasoning  # few programs need it

            engine.front_end.inputs.generation.form_places = FormsAfterReasoning(name)
        self._requests = OfflineRequests(engine)
        self._lock = threading.RLock()
        self._description = ""

    # text

    @one_at_a_time
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: GivenAdapters = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs are in the order of the prompts.

        Prompts: a str, a list of token ids, a TextPrompt, a TokensPrompt, or a list of these.
        Parameters, priorities and adapters: one for all, or one each. Parameters None:
        `get_default_sampling_params()`; an adapter None: the model itself.
        An error in the k-th prompt aborts those before it and is raised.
        """
        batch = self._prompts(
            prompts,
            sampling_params,
            mm_processor_kwargs,
            BatchOptions(
                lora_request=lora_request,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
            ),
        )
        return self._requests.run(batch, use_tqdm)

    @one_at_a_time
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several; see `enqueue_chat`."""
        batch = self._chats(
            messages,
            sampling_params,
            mm_processor_kwargs,
            chat_template,
            BatchOptions(
                lora_request=lora_request,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
            ),
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._requests.run(batch, use_tqdm)

    @one_at_a_time
    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: GivenAdapters = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts and return their request ids; `wait_for_completion` returns the outputs."""
        batch = self._prompts(
            prompts,
            sampling_params,
            mm_processor_kwargs,
            BatchOptions(
                lora_request=lora_request,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
            ),
        )
        return self._requests.enqueue(batch, use_tqdm)

    @one_at_a_time
    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: GivenAdapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[str]:
        """Queue conversations, each rendered to a prompt by the chat template.

        `chat_template` replaces the engine's: a template's text, or the name of one of the
        tokenizer's.
        """
        batch = self._chats(
            messages,
            sampling_params,
            mm_processor_kwargs,
            chat_template,
            BatchOptions(
                lora_request=lora_request,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
            ),
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._requests.enqueue(batch, use_tqdm)

    @one_at_a_time
    def wait_for_completion(
        self,
        output_type: type[OutputKind] | tuple[type[OutputKind], ...] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[OutputKind]:
        """Finish everything that was queued and return the outputs in the order of queuing.

        Raises InvalidType where one of them is not of `output_type`, a class or a tuple of classes;
        None: of any.
        """
        kinds: tuple[Any, ...] = (RequestOutput, PoolingRequestOutput)
        if output_type is not None:
            kinds = output_type if isinstance(output_type, tuple) else (output_type,)
        for kind in kinds:
            if kind not in (RequestOutput, PoolingRequestOutput):
                allowed = "it must be RequestOutput, PoolingRequestOutput, or a tuple of these"
                raise InvalidType("output_type", output_type, allowed)
        outputs = self._requests.wait(use_tqdm)
        for output in outputs:
            if not isinstance(output, kinds):
                found = f"an output is a {type(output).__name__}"
                raise InvalidType("output_type", output_type, found)
        return outputs

    @one_at_a_time
    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: GivenAdapters = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt, `concurrency_limit` prompts at a
        time. Adapters: one for all prompts, or one each.

        The texts are decoded from prompt and output together.
        """
        options = BatchOptions(lora_request=lora_request)
        runner = BeamRunner(self.llm_engine, self._requests, params, concurrency_limit, options)
        return runner.run(as_prompts(prompts), use_tqdm)

    # the engine

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters: those of the model's files, and 16 tokens without a limit."""
        return SamplingParams(**self.llm_engine.front_end.sampling_defaults)

    @property
    def model_config(self) -> ModelView:
        """The part of the plan about the model."""
        return self.llm_engine.model_config

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and completes requests."""
        return self.llm_engine.input_processor

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks that requests may ask for."""
        return self.get_supported_tasks()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of workers in all cores, or in one core."""
        return len(self.llm_engine.front_end.client.engine_indices) if include_dp else 1

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics; needs `disable_log_stats=False`."""
        return self.llm_engine.get_metrics()

    def close(self) -> None:
        """Abort what is queued and release the memory."""
        with self._lock:
            self._requests.forget()
            self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Describe the model."""
        if not self._description:
            plan = self.llm_engine.front_end.plan
            if plan is None:
                self._description = object.__repr__(self)
            else:
                from quire.models.show import describe  # few ask

                self._description = describe(plan.model.decoder)
        return self._description

    @one_at_a_time
    def _call(self, call: Utility[T]) -> T:
        return self.llm_engine._call(call)

    def _prompts(
        self,
        prompts: Any,
        sampling_params: Any,
        mm_processor_kwargs: Mapping[str, Any] | None,
        options: BatchOptions,
    ) -> OfflineBatch:
        """The batch of `generate`. Raises RequestError."""
        self._check_kwargs(mm_processor_kwargs)
        given = [with_processor_kwargs(each, mm_processor_kwargs) for each in as_prompts(prompts)]
        params = self._params(sampling_params)
        return OfflineBatch(prompts=given, total=len(given), params=params, options=options)

    def _chats(
        self,
        messages: Any,
        sampling_params: Any,
        mm_processor_kwargs: Mapping[str, Any] | None,
        chat_template: str | None,
        options: BatchOptions,
        **rendering: Any,
    ) -> OfflineBatch:
        """The batch of `chat`, whose conversations are rendered one by one. Raises RequestError."""
        from quire.text.chat import render_chat  # imports jinja2

        self._check_kwargs(mm_processor_kwargs)
        tokenizer, chats = self.get_tokenizer(), _as_chats(messages)
        encoding = encode_options(options.tokenization_kwargs)
        template = chat_template or self.llm_engine.front_end.chat_template
        render = partial(render_chat, tokenizer, chat_template=template, **rendering)
        prompt_of = self.llm_engine.front_end.inputs.chat_prompt
        rendered = (
            with_processor_kwargs(prompt_of(chat, render), mm_processor_kwargs) for chat in chats
        )
        return OfflineBatch(
            prompts=rendered,
            total=len(chats),
            params=self._params(sampling_params),
            options=replace(options, tokenization_kwargs={"add_special_tokens": False, **encoding}),
        )

    def _check_kwargs(self, mm_processor_kwargs: object) -> None:
        if mm_processor_kwargs and self.llm_engine.front_end.inputs.pictures is None:
            allowed = "this engine takes text alone"
            raise InvalidParameter("mm_processor_kwargs", mm_processor_kwargs, allowed)

    def _params(self, given: Any) -> Any:
        """The parameters of a generation. Raises RequestError, InvalidType for those of pooling."""
        if not self.llm_engine.front_end.inputs.limits.generates:
            raise RequestError(
                "This engine pools prompts and generates no text. Call embed(), encode(), "
                "classify() or score(), or start it with runner='generate' on a model that "
                "generates."
            )
        for one in given if isinstance(given, list | tuple) else [given]:
            if isinstance(one, PoolingParams):
                allowed = "it must be a SamplingParams, or a list of them"
                raise InvalidType("sampling_params", one, allowed)
        return self.get_default_sampling_params() if given is None else given


def _as_chats(messages: Any) -> list[Any]:
    """The conversations in `messages`: one is a list of dicts, several are a list of those."""
    if not isinstance(messages, (list, tuple)):
        allowed = "it must be a list of messages or a list of such lists"
        raise InvalidType("messages", messages, allowed)
    is_one = bool(messages) and not isinstance(messages[0], (list, tuple))
    return [messages] if is_one else list(messages)


def _show_options() -> None:
    """Give the constructor a signature and a docstring that name every option of the engine."""
    own = inspect.signature(LLM.__init__)
    given = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    fields = [field for field in fields_of(EngineArgs) if field.name not in own.parameters]
    given += [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field))
        for field in fields
    ]
    LLM.__init__.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
    lines = [f"{field.name}: {field.metadata['option'].help}" for field in fields]
    LLM.__init__.__doc__ = "\n\n".join([inspect.getdoc(LLM.__init__) or "", *lines])


_show_options()
