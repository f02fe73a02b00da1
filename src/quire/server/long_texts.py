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
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from quire.encodable import NotEncodable, to_msgpack
from quire.engine.frontend.pooling_input import Truncation
from quire.engine.process.child_process import ChildProcess
from quire.engine.process.start_message import LENGTH
from quire.errors import CapacityError, EngineError, PromptTooLong, RequestError
from quire.hardware.task_limits import OVER_TIME
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
_START_S = 120.0
_WAITING_FACTOR = 4
"""A task's limit in wall-clock time, as a multiple of its CPU time: the cores are shared."""
_MOST_WAITING = 64
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
            tokenizer_mode=tokenizer.mode,
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
            tokenizer_mode="auto",
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
        self, messages: Sequence[Any], options: dict[str, Any], *, size: int, is_trusted: bool
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
            render = partial(render_chat, self._tokenizer, messages, **options)
            text: str = await off_loop(size, self._rendering.timed, size, render)
            return text
        lane = self._lane(size if is_trusted else MEDIUM_CHARS + 1)
        answer = await lane.answer(RenderTask(list(messages), options))
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
        """End the processes."""
        for lane in (self._medium, self._long, self._drawing):
            lane.end()

    async def _refuse_by_size(self, text: str, limit: int) -> None:
        longest = await asyncio.to_thread(lambda: self._tokenizer.longest_token_bytes)
        if longest is None:
            return
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
        start = time.thread_time()
        try:
            return work()
        finally:
            taken_s = time.thread_time() - start
            if taken_s > (SLOW_S if num_chars <= INLINE_CHARS else SLOW_IN_THREAD_S):
                logger.warning("%s took %.2f s for a short text: %s", self._name, taken_s, _MOVED)
                self.is_slow = True


class _Held:
    """The process of a lane. A program that embeds the server may drop it without closing anything;
    what is garbage then is finalised in no order, so that this is not a part of the lane.
    """

    def __init__(self) -> None:
        self.child: ChildProcess | None = None

    def close(self) -> None:
        """End the process. Idempotent."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.pipe.close()


class _Lane:
    """One process that does one task after the other. It is started at the first, and again after
    it has ended. `doing` and `parameter`: what an error says of a text that ends it.
    """

    def __init__(self, start: TextStart, doing: str, parameter: str) -> None:
        self._start = start
        self._doing, self._parameter = doing, parameter
        self._held = _Held()
        weakref.finalize(self, self._held.close)
        self._is_ended = False
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def answer(self, task: TextTask) -> TextAnswer:
        """Have a task done. Raises RequestError where it ends the process, CapacityError."""
        if self._num_waiting >= _MOST_WAITING:
            raise CapacityError("Too many texts wait for their turn.", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._ask(task)
        finally:
            self._num_waiting -= 1

    def end(self) -> None:
        """End the process; those who wait for their turn start no other one."""
        self._is_ended = True
        self._held.close()

    async def _ask(self, task: TextTask) -> TextAnswer:
        if self._is_ended:
            raise EngineError("The server is shut down; the text is not worked on.")
        if self._held.child is not None and not self._held.child.is_running:
            self._held.close()
        child = self._held.child or await self._started()
        try:
            data = to_msgpack(task)
        except NotEncodable as error:
            text = f"A long conversation cannot be rendered: {error}."
            raise RequestError(text, parameter="messages") from None
        try:
            answered = await self._answered(child, data)
            if isinstance(answered, TextAnswer):
                return answered
            await asyncio.to_thread(child.end, 0.0)  # the system takes its time to free memory
        except BaseException:  # a caller that is gone, for one, waits for no end
            self._held.close()
            raise
        self._held.close()
        logger.warning("The process for long texts was ended: %s %s.", self._doing, answered)
        raise RequestError(
            f"{self._doing} {answered}; send a shorter one.", parameter=self._parameter
        )

    async def _answered(self, child: ChildProcess, data: bytes) -> TextAnswer | str:
        """What the process answers, or why it must be ended."""
        start = self._start
        try:
            async with asyncio.timeout(start.time_s * _WAITING_FACTOR):
                await _send(child, data)
                return msgspec.msgpack.decode(await _receive(child), type=TextAnswer)
        except TimeoutError:
            return f"takes more than {start.time_s:g} s"
        except (EOFError, OSError):
            await asyncio.to_thread(child.exit_words)
            if child.exit_code == -OVER_TIME:
                return f"takes more than {start.time_s:g} s"
            return f"takes more than {start.memory_bytes >> 20} MiB, or makes the process fail"

    async def _started(self) -> ChildProcess:
        child = self._held.child = ChildProcess(_MODULE)
        try:
            child.start(msgspec.structs.replace(self._start))
            child.pipe.setblocking(False)
            async with asyncio.timeout(_START_S):
                await _receive(child)
        except (TimeoutError, EOFError, OSError):
            self._held.close()
            raise EngineError("The process that tokenizes long texts did not start.") from None
        except BaseException:
            self._held.close()
            raise
        return child


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
        await asyncio.sleep(0)
    return listed


async def _send(child: ChildProcess, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(child.pipe, LENGTH.pack(len(data)))
    await loop.sock_sendall(child.pipe, data)


async def _receive(child: ChildProcess) -> bytes:
    """The next message. Raises EOFError."""
    (length,) = LENGTH.unpack(await _exactly(child, LENGTH.size))
    return await _exactly(child, length)


async def _exactly(child: ChildProcess, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray(length)
    view, place = memoryview(data), 0
    while place < length:
        num = await loop.sock_recv_into(child.pipe, view[place:])
        if not num:
            raise EOFError
        place += num
    return bytes(data)
