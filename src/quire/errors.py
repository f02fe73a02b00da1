"""Every exception that Quire raises on purpose, in one tree.

The class tells who can fix it. Where users of this field expect a `ValueError` or `TypeError`, the
class is one of these too.

    EngineError
    ├── RequestError                   the sender can: HTTP 400
    │   ├── InvalidParameter           a value that is not allowed
    │   │   ├── InvalidType            ... because of its type
    │   │   ├── UnknownParameter       a name that does not exist
    │   │   └── NotBuiltYet            a documented value that is not built
    │   ├── ContextLengthExceeded
    │   │   └── PromptTooLong
    │   └── BadAdapter
    │       └── AdapterNotFound
    ├── CapacityError                  nobody has to: HTTP 503, try again
    │   ├── QueueOverflowError
    │   └── MaxQueuedTokensError
    ├── GenerationError                it failed while it ran
    │   └── EngineGenerateError
    ├── InputStreamError               the caller's own stream of inputs raised
    ├── ProfilerAlreadyActive
    ├── WeightUpdateError              the trainer can: HTTP 409
    ├── EngineDeadError                a restart
    │   └── PeersLost
    └── LoadError                      the operator can, before the engine starts
        ├── ModelNotFound
        ├── UnsupportedArchitecture
        ├── UnknownConfigKey
        ├── UnsupportedConfigValue
        ├── WeightMismatch
        ├── CorruptCheckpoint
        └── PluginError
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

_MAX_SHOWN = 80
"""Characters of a value that a text shows, so no more than as many parts of it."""
_MAX_LOAD_TEXT = 2000


class EngineError(Exception):
    """Root of the tree; its text is fit to be shown to the person who made the call."""


class RequestError(EngineError, ValueError):
    """The request cannot be served as it was written; `http_status` is what a server answers."""

    http_status = 400

    def __init__(
        self, message: str, *, parameter: str | None = None, value: object | None = None
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def described(self, show: Callable[[object], str]) -> str:
        """The text, with values written by `show`: a server writes them as JSON."""
        return str(self)


class InvalidParameter(RequestError):
    """A parameter has a value that it may not have: what was given, what is allowed, what to do."""

    _rest: str | None = None

    def __init__(self, name: str, value: object, allowed: str, hint: str = "") -> None:
        self._rest = f"is not allowed: {allowed}. {hint}".rstrip()
        super().__init__(self._text(name, shown(value)), parameter=name, value=value)

    def described(self, show: Callable[[object], str]) -> str:
        if self._rest is None:
            return str(self)
        return self._text(str(self.parameter), show(_beginning(self.value)))

    def _text(self, name: str, shown: str) -> str:
        if len(shown) > _MAX_SHOWN:
            shown = shown[: _MAX_SHOWN - 3] + "..."
        return f"{name}={shown} {self._rest}"


def shown(value: object) -> str:
    """A value as the text of an error shows it, whatever it is."""
    try:
        return repr(_beginning(value))
    except Exception:  # of a class of its caller's, or an int of thousands of digits
        return f"<{type(value).__name__}>"


def _beginning(value: object, budget: list[int] | None = None) -> object:
    """As much of a value as a text can show: a request may hold megabytes, or contain itself."""
    left = [_MAX_SHOWN] if budget is None else budget
    left[0] -= 1
    if type(value) is str:
        return value[:_MAX_SHOWN]
    if type(value) is list:
        return [_beginning(item, left) for item in value[: max(0, left[0])]]
    if type(value) is tuple:
        return tuple(_beginning(item, left) for item in value[: max(0, left[0])])
    if type(value) is dict:
        items = islice(value.items(), max(0, left[0]))
        return {key: _beginning(item, left) for key, item in items}
    return value


class InvalidType(InvalidParameter, TypeError):
    """A parameter has a value of a type that it may not have."""


class UnknownParameter(InvalidParameter, TypeError):
    """A keyword or field that does not exist."""

    def __init__(self, name: str, allowed: str, hint: str = "") -> None:
        RequestError.__init__(
            self, f"{name!r} is not a parameter here: {allowed}. {hint}".rstrip(), parameter=name
        )


class NotBuiltYet(InvalidParameter, NotImplementedError):
    """A documented parameter at a value that this release does not implement."""

    def __init__(self, name: str, value: object, hint: str) -> None:
        super().__init__(name, value, "this release does not implement it", hint)


class ContextLengthExceeded(RequestError):
    """Prompt and output are longer than the model's context."""


class PromptTooLong(ContextLengthExceeded):
    """The prompt leaves no room for a single new token. `is_estimate`: it has `num_tokens` or more,
    which is known from its length without tokenizing all of it. `has_output`: of a model that
    generates. `bound`: the parameter that has the limit, where it is less than the model's.
    """

    def __init__(
        self,
        num_tokens: int,
        max_model_len: int,
        *,
        is_estimate: bool = False,
        has_output: bool = True,
        bound: str = "max_model_len",
    ) -> None:
        least = "at least " if is_estimate else ""
        together = " of prompt and output together" if has_output else ""
        whose = (
            f"This model's maximum context length is {max_model_len} tokens{together}"
            if bound == "max_model_len"
            else f"{bound} is {max_model_len} tokens"
        )
        super().__init__(
            f"{whose}, and the prompt is too long: it has {least}{num_tokens} tokens. Please "
            f"reduce the length of the input prompt, or raise {bound}.",
            parameter="prompt",
            value=num_tokens,
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class BadAdapter(RequestError):
    """A LoRA adapter that cannot be used with this model; the text says why. Long texts, which show
    what files hold, are cut.
    """

    def __init__(self, message: str) -> None:
        if len(message) > _MAX_LOAD_TEXT:
            message = message[: _MAX_LOAD_TEXT - 3] + "..."
        super().__init__(message, parameter="lora_request")


class AdapterNotFound(BadAdapter):
    """The folder that a request names has no adapter."""


class GenerationError(EngineError):
    """One request failed inside the engine; the others go on (HTTP 500)."""

    http_status = 500


class EngineGenerateError(GenerationError):
    """A stream ended because of an unexpected failure while it was served."""


class CapacityError(EngineError):
    """There is no room at the moment; trying again later can succeed (HTTP 503)."""

    http_status = 503

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueOverflowError(CapacityError):
    """Too many requests are unfinished (`max_num_queued_reqs`)."""


class MaxQueuedTokensError(CapacityError):
    """Too many prompt tokens wait (`max_num_queued_tokens`)."""


class InputStreamError(EngineError):
    """The generator that a prompt streamed from raised `cause`, whose text this has."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause = cause


class ProfilerAlreadyActive(EngineError):
    """A trace is being taken already (HTTP 409)."""

    http_status = 409


class EngineDeadError(EngineError):
    """The engine core has ended and was not restarted; no request can be served.

    `engine_index` says which core, where there are several; None when none is left.
    `ended_with_group`: it ended only because another core of its lock-step group died.
    """

    http_status = 503

    def __init__(
        self,
        message: str = "The engine core has ended; its log says why.",
        *,
        engine_index: int | None = None,
    ) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.ended_with_group = False


class WeightUpdateError(EngineError, RuntimeError):
    """An update of the weights is not possible in the state that the engine is in (HTTP 409)."""


class PeersLost(EngineDeadError):
    """Another core of a group in lock step is gone; the group is restarted as a whole."""


class LoadError(EngineError, ValueError):
    """A model, tokenizer or configuration cannot be loaded. The text, which shows what files hold,
    is cut at a length that a person reads.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > _MAX_LOAD_TEXT:
            message = message[: _MAX_LOAD_TEXT - 3] + "..."
        super().__init__(message)


class PluginError(LoadError):
    """An installed package plugs in what cannot be used; the text names it, and says why."""


class ModelNotFound(LoadError):
    """Neither a folder nor a reachable hub repository has this name."""


class UnsupportedArchitecture(LoadError):
    """config.json names an architecture that no family of ours describes."""


class UnknownConfigKey(LoadError):
    """config.json has a key of unknown meaning: ignoring it could change the answers."""


class UnsupportedConfigValue(LoadError):
    """config.json has a known key at a value that is not implemented."""


class WeightMismatch(LoadError):
    """The checkpoint's tensors are not exactly those that the model needs."""


class CorruptCheckpoint(LoadError):
    """A weight file is truncated or is not what its header claims."""
