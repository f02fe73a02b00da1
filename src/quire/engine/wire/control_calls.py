"""Calls of a core besides requests, and how a verb's entry becomes a method that sends one."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from types import NoneType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, get_args, overload

from quire.engine.wire.declared_types import argument_types

T = TypeVar("T")
P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of unfinished requests: aborted, finished first, or frozen."""


@dataclass(frozen=True, slots=True)
class Utility(Generic[T]):
    """A call of a core's method that gives a T; the caller waits `timeout_s` (None: for ever)."""

    method: str
    args: tuple[Any, ...] = ()
    timeout_s: float | None = None


def first(answers: Sequence[Any]) -> Any:
    """The answer of cores that all give the same."""
    return answers[0]


def joined(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """One list of what the workers of all cores gave."""
    return [result for each in answers for result in each]


def united(answers: Sequence[Iterable[Any]]) -> list[Any]:
    """Union of the cores' answers, once and in order."""
    return sorted({result for each in answers for result in each})


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreMethod:
    """The method of a core that serves a verb.

    `combine` makes one answer of several, in the order of the cores' indices. `is_repeatable`: the
    call may be sent again when a core died before it answered. `begins` and `ends` name the state
    that the call puts a core in or takes it out of ("paused", "asleep"). A call that begins a state
    is replayed in a restarted core, with the arguments that `replay` makes of the first ones; so is
    the last call of each name that `keeps` makes of them (None: of no name), until one that
    `drops` it.
    """

    name: str
    combine: Callable[[Sequence[Any]], Any] = first
    is_repeatable: bool = True
    begins: str | None = None
    ends: str | None = None
    replay: Callable[..., tuple[Any, ...]] = lambda *args: args
    keeps: Callable[..., Hashable | None] | None = None
    drops: Callable[..., Sequence[Hashable]] = lambda *args: ()


class BlockingFace(ABC):
    """Sends calls and blocks until they are answered."""

    @abstractmethod
    def _call(self, call: Utility[T]) -> T:
        """Call every core, and give their one answer."""


class AwaitedFace(ABC):
    """Sends calls and awaits their answers."""

    @abstractmethod
    async def _call(self, call: Utility[T]) -> T:
        """Call every core, and give their one answer."""


class Verb(Generic[P, T]):
    """A method of every face: it sends its call by the face's `_call` and gives the answer.

    As an attribute of a `BlockingFace` it is a function, of an `AwaitedFace` a coroutine function.
    Both have the name, the arguments and the docstring of `make`, which makes the call once the
    arguments are of the types that it declares; `convert` makes of the cores' one answer what the
    caller gets.
    """

    def __init__(
        self,
        make: Callable[Concatenate[Any, P], Utility[T]],
        core: CoreMethod,
        convert: Callable[[Any], Any],
    ) -> None:
        def call(face: Any, *args: Any, **kwargs: Any) -> Utility[T]:
            argument_types(make).check(face, *args, **kwargs)
            return make(face, *args, **kwargs)

        def blocking(face: Any, *args: Any, **kwargs: Any) -> Any:
            return convert(face._call(call(face, *args, **kwargs)))

        async def awaited(face: Any, *args: Any, **kwargs: Any) -> Any:
            return convert(await face._call(call(face, *args, **kwargs)))

        self.core = core
        self._blocking = _shown_as(make, blocking)
        self._awaited = _shown_as(make, awaited)

    @overload
    def __get__(self, face: None, kind: type) -> Callable[Concatenate[Any, P], Any]: ...
    @overload
    def __get__(self, face: BlockingFace, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, face: AwaitedFace, kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, face: object, kind: type) -> Any:
        method = self._awaited if issubclass(kind, AwaitedFace) else self._blocking
        return method if face is None else method.__get__(face, kind)


def _shown_as(make: Callable[..., Any], method: Method) -> Method:
    """`method` with the name, docstring and signature of `make`; returns the T of `Utility[T]`."""
    update_wrapper(method, make)
    signature = inspect.signature(make, eval_str=True)
    [answer] = get_args(signature.return_annotation)
    shown = signature.replace(return_annotation=None if answer is NoneType else answer)
    method.__signature__ = shown  # type: ignore[attr-defined]
    return method


def verb(
    core: str | None = None, *, convert: Callable[[Any], Any] = lambda answer: answer, **fields: Any
) -> Callable[[Callable[Concatenate[Any, P], Utility[T]]], Verb[P, T]]:
    """Turn a function that makes a call into a verb. `core` names the core's method (None: as the
    function); `fields` are the others of `CoreMethod`.
    """

    def made(make: Callable[Concatenate[Any, P], Utility[T]]) -> Verb[P, T]:
        return Verb(make, CoreMethod(name=core or make.__name__, **fields), convert)

    return made
