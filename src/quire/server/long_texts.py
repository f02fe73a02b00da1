"""Texts to ids and conversations to prompts, so that no request waits for another one's text.

Short texts are tokenized where they are. Long ones, and what could take a time or memory without
bound (templates of requests, expressions that backtrack), go to two processes of their own
(text_process.py), which start when they are first needed: one for texts that take fractions of a
second, one for the rest. A text that cannot fit is refused by its size alone. A third process
draws answers for the page, so that neither prompts nor streams wait for that.
"""

from __future__ import annotations

import array
import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from quire.encodable import NotEncodable, to_msgpack
from quire.engine.frontend.pooling_input import Truncation
from quire.errors import PromptTooLong, RequestError
from quire.media.chat_text import PicturesAsText
from quire.processes.task_lane import TaskEnded, TaskLane
from quire.server.text_process import (
    DrawTask,
    EncodeTask,
    PairTask,
    RenderTask,
    TextAnswer,
    TextStart,
    TextTask,
    raise_failure,
)
from quire.text.chat import render_chat
from quire.text.templates.template_bounds import MAX_CHARACTERS
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

INLINE_CHARS = 4096
"""Texts of this length are tokenized in the event loop, in 3 ms."""
SHORT_CHARS = 2**16
"""Texts of this length are tokenized in a thread, those above in another process."""
MEDIUM_CHARS = 2**18
"""Texts above this wait for each other."""
TIME_S = 20.0
MEMORY_BYTES = 2 * 2**30
DRAWING_TIME_S = 5.0
DRAWING_MEMORY_BYTES = 2**29
MOST_LISTED = 2**21
"""Most ids of a reply, unless the model takes more."""

SLOW_S = 0.1
"""CPU time in the event loop after which texts, or conversations, go to another process."""
SLOW_IN_THREAD_S = 1.0

_MOVED = "from now on another process does this."
_MODULE = "quire.server.text_process"
_SLICE = 2**16


class LongTexts:
    """Tokenizes and renders for one API server. A task in another process takes at most `time_s`
    of CPU time, and `memory_bytes` in addition to the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        *,
        time_s: float = TIME_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        start = TextStart(
            tokenizer_folder=tokenizer.name_or_path,
            mode=tokenizer.mode,
            time_s=time_s,
            memory_bytes=memory_bytes,
        )
        self._tokenizing = _Pace("Tokenizing", is_slow=tokenizer.may_backtrack)
        self._rendering = _Pace("The chat template")
        self._most_listed = max(MOST_LISTED, max_model_len)
        doing = "Tokenizing this text"
        self._medium, self._long = _Lane(start, doing, "prompt"), _Lane(start, doing, "prompt")
        drawing = TextStart(
            tokenizer_folder=None,
            mode="auto",
            time_s=min(time_s, DRAWING_TIME_S),
            memory_bytes=min(memory_bytes, DRAWING_MEMORY_BYTES),
        )
        self._drawing = _Lane(drawing, "Drawing this text", "text")

    async def ids(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        limit: int | None,
        cut: Truncation | None = None,
        most_read: int = 0,
    ) -> list[int]:
        """The ids of `text`; see `EncodeTask`. `limit`: from how many on it is refused; None:
        never.

        Raises PromptTooLong, perhaps by an estimate, and RequestError for a text that takes too
        much time or memory, CapacityError when too many others wait.
        """
        size = len(text)
        if limit is not None and size > max(limit, INLINE_CHARS):
            await self._refuse_by_size(text, limit)
        task = EncodeTask(text, add_special_tokens, limit, self._most_listed, cut, most_read)
        # a process costs a copy and a wait, which is more than such a text takes
        if size <= SHORT_CHARS and not self._tokenizing.is_slow:
            encode = partial(self._tokenizer.encode, text, add_special_tokens)
            if cut is not None or most_read:
                encode = partial(task.encoded, self._tokenizer)
            ids: list[int] = await off_loop(size, self._tokenizing.timed, size, encode)
            return ids
        answer = await self._lane(size).answer(task)
        raise_failure(answer, limit)
        return await _as_list(answer.ids)

    async def pair(
        self, task: PairTask, *, size: int, is_trusted: bool
    ) -> tuple[list[int], int | None]:
        """The prompt of two texts; see `PairTask`. `size`: characters of all that it is made of;
        `is_trusted`: its template is the operator's. Raises what `ids` raises.
        """
        is_slow = self._tokenizing.is_slow or self._rendering.is_slow
        if is_trusted and size <= SHORT_CHARS and not is_slow:
            encode = partial(task.encoded, self._tokenizer)
            made: tuple[list[int], int | None] = await off_loop(
                size, self._tokenizing.timed, size, encode
            )
            return made
        lane = self._lane(size if is_trusted else MEDIUM_CHARS + 1)
        answer = await lane.answer(task)
        raise_failure(answer, None)
        return await _as_list(answer.ids), answer.second_text_at

    async def rendered(
        self,
        messages: Sequence[Any],
        options: dict[str, Any],
        *,
        size: int,
        is_trusted: bool,
        join_pictures: PicturesAsText | None = None,
    ) -> str:
        """A conversation as a prompt: `render_chat` with `options`. `size`: characters of all that
        is rendered; `is_trusted`: the template is the model's or the operator's.
        """
        if size > MAX_CHARACTERS:
            raise RequestError(
                f"The conversation has more than {MAX_CHARACTERS} characters; shorten it.",
                parameter="messages",
            )
        if is_trusted and size <= SHORT_CHARS and not self._rendering.is_slow:
            render = partial(
                render_chat, self._tokenizer, messages, join_pictures=join_pictures, **options
            )
            text: str = await off_loop(size, self._rendering.timed, size, render)
            return text
        lane = self._lane(size if is_trusted else MEDIUM_CHARS + 1)
        answer = await lane.answer(RenderTask(list(messages), options, join_pictures))
        raise_failure(answer, None)
        return answer.text or ""

    async def drawing(self, text: str, *, is_whole: bool) -> str:
        """The finished blocks of an answer as nodes (`Drawing`), as JSON. Raises RequestError for
        a text that takes too much time or memory, CapacityError when too many others wait.
        """
        answer = await self._drawing.answer(DrawTask(text, is_whole))
        raise_failure(answer, None)
        return answer.text or ""

    def close(self) -> None:
        for lane in (self._medium, self._long, self._drawing):
            lane.end()

    async def _refuse_by_size(self, text: str, limit: int) -> None:
        longest = await asyncio.to_thread(lambda: self._tokenizer.longest_token_bytes)
        if longest is None:
            return
        # no token has more bytes than this, so it has at least so many tokens: a bound without
        # tokenizing
        least = -(-len(text.encode()) // longest)
        if least >= limit:
            raise PromptTooLong(least, limit, is_estimate=True)

    def _lane(self, size: int) -> _Lane:
        return self._medium if size <= MEDIUM_CHARS else self._long


class _Pace:
    """Whether a kind of work has proved too slow for this process."""

    def __init__(self, name: str, *, is_slow: bool = False) -> None:
        self._name = name
        self.is_slow = is_slow

    def timed(self, num_chars: int, work: Callable[[], Any]) -> Any:
        """Do `work` on so many characters."""
        # of this thread, so that a busy machine does not look like a slow tokenizer
        start = time.thread_time()
        try:
            return work()
        finally:
            taken_s = time.thread_time() - start
            if taken_s > (SLOW_S if num_chars <= INLINE_CHARS else SLOW_IN_THREAD_S):
                logger.warning("%s took %.2f s for a short text: %s", self._name, taken_s, _MOVED)
                self.is_slow = True


class _Lane:
    """One process for texts. `doing` and `parameter`: what an error says of a text that ends it."""

    def __init__(self, start: TextStart, doing: str, parameter: str) -> None:
        self._doing, self._parameter = doing, parameter
        self._tasks = TaskLane(_MODULE, start, "tokenizes long texts")

    async def answer(self, task: TextTask) -> TextAnswer:
        """Have a task done. Raises RequestError where it ends the process, CapacityError."""
        try:
            data = to_msgpack(task)
        except NotEncodable as error:
            text = f"A long conversation cannot be rendered: {error}."
            raise RequestError(text, parameter="messages") from None
        try:
            answer = await self._tasks.answer(data)
        except TaskEnded as ended:
            raise RequestError(
                f"{self._doing} {ended.reason}; send a shorter one.", parameter=self._parameter
            ) from None
        return msgspec.msgpack.decode(answer, type=TextAnswer)

    def end(self) -> None:
        """End the process; those who wait for their turn start no other one."""
        self._tasks.end()


async def off_loop(size: int, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Run `work(*args)`, in a thread if there is much to do, so that it stalls no stream. `size`:
    characters, or what takes as long.
    """
    if size <= INLINE_CHARS:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)


async def _as_list(ids: bytes) -> list[int]:
    """32-bit integers as a list; others get their turn between the parts of a long one."""
    packed = array.array("I")
    packed.frombytes(ids)
    if len(packed) <= _SLICE:
        return packed.tolist()
    listed: list[int] = []
    for place in range(0, len(packed), _SLICE):
        listed += packed[place : place + _SLICE]
        # no stream gets a token while a list is made
        await asyncio.sleep(0)
    return listed
