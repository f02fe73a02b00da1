"""The bodies of requests to models that pool. A field that is null counts as left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta

from quire.engine.frontend.score_prompts import ScoredText, text_or_content
from quire.errors import InvalidParameter
from quire.params import PoolingParams
from quire.server.openai.prompt_forms import prompts_in
from quire.server.openai.requests import ChatRequest
from quire.server.openai.sampling_fields import RequestFields

Conversation: TypeAlias = list[dict[str, Any]]
Item: TypeAlias = str | list[int] | Conversation
"""One input: a text, token ids, or a conversation."""

DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
Encoding = Literal["float", "base64", "bytes", "bytes_only"]

_OF_CONVERSATIONS = (
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
)
_ENGINE_NAMES = ("prompt", "text", "prompt_token_ids", "multi_modal_data")
"""The engine's names of an input."""


class PooledBody(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of all requests to models that pool. `INPUT` is the field of what is pooled."""

    INPUT: ClassVar[str] = "input"

    data_parallel_rank: Annotated[int, Meta(ge=0, lt=2**16)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    @property
    def is_padded(self) -> bool:
        """Whether texts get padding tokens up to the length that they are cut to."""
        return False

    @property
    def truncation(self) -> dict[str, Any]:
        """Truncation of inputs, by the engine's names."""
        return {}

    def field_of(self, parameter: str) -> str:
        return self.INPUT if parameter in _ENGINE_NAMES else parameter


class PoolingFields(PooledBody, kw_only=True):
    """The fields that are not Cohere's."""

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("user",)

    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["do_not_pad", "max_length"] | None = None
    use_activation: bool | None = None

    @property
    def is_padded(self) -> bool:
        return self.padding == "max_length"

    @property
    def truncation(self) -> dict[str, Any]:
        given = {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
        }
        return {name: value for name, value in given.items() if value is not None}

    def field_of(self, parameter: str) -> str:
        if parameter == "max_length":
            return "truncate_prompt_tokens"
        return super().field_of(parameter)

    def params(self, task: str) -> PoolingParams:
        """The engine's parameters. Raises InvalidParameter."""
        return PoolingParams(task=task, use_activation=self.use_activation)


class InputFields(PoolingFields, kw_only=True):
    """The input: `input` or `messages`, each one or a list."""

    input: str | list[Any] | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def items(self) -> list[Item]:
        """The inputs. Raises InvalidParameter."""
        name, given = (
            ("input", self.input) if self.messages is None else ("messages", self.messages)
        )
        if given is None or (self.messages is not None and self.input is not None):
            allowed = "either input or messages must be given"
            raise InvalidParameter("input", self.input, allowed)
        if isinstance(given, list) and given:
            # a list of objects is one conversation, a list of such lists is several
            if _is_conversation(given):
                return [given]
            if all(isinstance(one, list) and one and _is_conversation(one) for one in given):
                return given
        if name == "messages":
            allowed = "it must be a conversation (a list of messages) or a list of such"
            raise InvalidParameter(name, given, allowed)
        for field in _OF_CONVERSATIONS:
            if (value := getattr(self, field)) is not None:
                raise InvalidParameter(field, value, "it goes with conversations only")
        return [*prompts_in(name, given)]

    def as_chat(self, messages: Conversation) -> ChatRequest:
        """One conversation as a chat request, which opens no answer unless told so."""
        chat = ChatRequest(
            messages=messages,
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=self.media_io_kwargs,
        )
        chat.check()
        return chat


class VectorFields(InputFields, kw_only=True):
    """Form of the numbers in a reply."""

    encoding_format: Encoding | None = None
    embed_dtype: DType | None = None
    endianness: Endianness | None = None

    def check(self) -> None:
        """Raise InvalidParameter for a format of bytes where numbers are written as JSON."""
        if self.encoding_format not in (None, "float"):
            return
        allowed = "it belongs to encoding_format base64, bytes or bytes_only"
        if self.embed_dtype not in (None, "float32"):
            raise InvalidParameter("embed_dtype", self.embed_dtype, allowed)
        if self.endianness not in (None, "native"):
            raise InvalidParameter("endianness", self.endianness, allowed)


class EmbeddingRequest(VectorFields, kw_only=True):
    """`POST /v1/embeddings`."""

    dimensions: int | None = None

    def params(self, task: str) -> PoolingParams:
        activates = self.use_activation
        return PoolingParams(task=task, use_activation=activates, dimensions=self.dimensions)


class PoolingRequest(VectorFields, kw_only=True):
    """`POST /pooling`. `data` is for the plugin that processes it, in place of the input."""

    task: str | None = None
    data: Any = None


class ClassificationRequest(InputFields, kw_only=True):
    """`POST /classify`."""


class PairFields(PoolingFields, kw_only=True):
    """Comparison of two texts."""

    INPUT: ClassVar[str] = "documents"

    @property
    def names(self) -> tuple[str, str]:
        """The fields of the first and of the second texts."""
        return "query", "documents"

    instruction: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None

    def variables(self) -> Mapping[str, Any]:
        """The names that a template may use."""
        given = dict(self.chat_template_kwargs or {})
        if self.instruction is not None:
            given.setdefault("instruction", self.instruction)
        return given

    def most_read(self) -> dict[str, int]:
        """The most tokens that are read of a query and of a document; 0: all."""
        names = ("max_tokens_per_query", "max_tokens_per_doc")
        return {name: getattr(self, name) or 0 for name in names}

    def check_lengths(self, max_model_len: int) -> None:
        """Raise InvalidParameter for a number of tokens that the model cannot take."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < max_model_len:
                allowed = (
                    f"{name} must be a non-negative integer below max_model_len={max_model_len} "
                    "(0: all tokens)"
                )
                raise InvalidParameter(name, value, allowed)


Side: TypeAlias = str | dict[str, Any] | list[str | dict[str, Any]]
_PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)


class ScoreRequest(PairFields, kw_only=True):
    """`POST /score`: two fields, which have several names."""

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The two fields that are given. Raises InvalidParameter for any other number of them."""
        names = [name for pair in _PAIRS for name in pair if getattr(self, name) is not None]
        pair = next((pair for pair in _PAIRS if {*pair} == {*names}), None)
        if pair is None:
            shown = ", ".join(" and ".join(pair) for pair in _PAIRS)
            allowed = f"a request has one of these pairs of fields: {shown}"
            raise InvalidParameter("queries", self.queries, allowed)
        return pair

    def sides(self) -> tuple[list[ScoredText], list[ScoredText]]:
        """Both sides. Raises InvalidParameter."""
        pair = self.names
        first, second = (texts_of(name, getattr(self, name)) for name in pair)
        if not first or not second:
            name = pair[1] if first else pair[0]
            raise InvalidParameter(name, [], "at least one text must be given")
        if len(first) not in (1, len(second)):
            allowed = "input lengths must be either 1:1, 1:N or N:N"
            raise InvalidParameter(pair[0], f"{len(first)} for {len(second)}", allowed)
        return first, second


class RerankRequest(PairFields, kw_only=True):
    """`POST /rerank`."""

    query: str | dict[str, Any]
    documents: dict[str, Any] | list[str | dict[str, Any]]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None

    def sides(self) -> tuple[list[ScoredText], list[ScoredText]]:
        """The query and the documents. Raises InvalidParameter."""
        documents = texts_of("documents", self.documents)
        if not documents:
            raise InvalidParameter("documents", [], "at least one document must be given")
        return texts_of("query", self.query), documents


def texts_of(name: str, given: Side) -> list[ScoredText]:
    """Texts of one side: strings, {"text": ...} or {"content": ...}. Raises InvalidParameter."""
    items = given if isinstance(given, list) else [given]
    return [item if isinstance(item, str) else text_or_content(name, item) for item in items]


def _is_conversation(given: list[Any]) -> bool:
    return all(isinstance(one, dict) for one in given)
