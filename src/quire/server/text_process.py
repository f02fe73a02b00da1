"""The process in which long texts are tokenized, long conversations rendered and answers drawn for
the page, one after the other and within limits. long_texts.py is the other end of its pipe.
"""

from __future__ import annotations

import array
import socket
from pathlib import Path
from typing import Any

import msgspec

from quire.encodable import json_or_repr, text_of, to_json, to_msgpack
from quire.engine.frontend.pooling_input import PoolingFacts, Truncation
from quire.engine.frontend.score_prompts import CrossPrompts
from quire.errors import PromptTooLong, RequestError
from quire.media.chat_text import PicturesAsText
from quire.params import PoolingParams
from quire.processes.child_main import ChildProgram
from quire.processes.task_main import TaskStart, lower_priority, serve_tasks
from quire.text.chat import render_chat
from quire.text.tokenizer import Tokenizer

_BEGINNING = 8
"""Number of characters for each token that fits with which a text is first tried."""


class TextStart(TaskStart, kw_only=True):
    """The tokenizer of the process. Without a folder there is none, and the process only draws."""

    tokenizer_folder: str | None
    mode: str


class EncodeTask(msgspec.Struct, tag="encode"):
    """Tokenize `text`. `limit`: from how many tokens on it is refused; None: it is not.
    `most_listed`: the most ids that an answer may have. `cut`: what is left of it. `most_read`:
    only so many tokens at its beginning are read, special tokens not counted; 0: all.
    """

    text: str
    add_special_tokens: bool
    limit: int | None
    most_listed: int
    cut: Truncation | None = None
    most_read: int = 0

    def encoded(self, tokenizer: Tokenizer) -> list[int]:
        text, cut = self.text, self.cut
        if self.most_read:
            text = tokenizer.beginning(text, self.most_read)
        if cut is None:
            return tokenizer.encode(text, self.add_special_tokens)
        return tokenizer.encode(
            text, self.add_special_tokens, max_length=cut.limit, truncation_side=cut.side
        )


class PairTask(msgspec.Struct, tag="pair"):
    """Make one prompt of two texts (`CrossPrompts`). `truncation` has `truncate_prompt_tokens` and
    `truncation_side`, `most_read` how many tokens of each text are read (`extra_kwargs`).
    """

    query: str
    document: str
    facts: PoolingFacts
    max_model_len: int
    template: str | None
    variables: dict[str, Any]
    truncation: dict[str, Any]
    most_read: dict[str, int]

    def encoded(self, tokenizer: Tokenizer) -> tuple[list[int], int | None]:
        """The ids, and where the second text begins if its tokens have another type."""
        make = CrossPrompts(
            tokenizer, self.facts, self.max_model_len, self.template, self.variables
        )
        params = PoolingParams(extra_kwargs=dict(self.most_read))
        prompt, params = make.of(self.query, self.document, params, self.truncation)
        return prompt["prompt_token_ids"], params.second_text_at


class RenderTask(msgspec.Struct, tag="render"):
    """Render a conversation; `options` are those of `render_chat`."""

    messages: list[Any]
    options: dict[str, Any]
    join_pictures: PicturesAsText | None = None


class DrawTask(msgspec.Struct, tag="draw"):
    """Draw the finished blocks of an answer, or if it `is_whole` all of it (`Drawing`)."""

    text: str
    is_whole: bool


TextTask = EncodeTask | PairTask | RenderTask | DrawTask
_decoder = msgspec.msgpack.Decoder(TextTask)


class TextAnswer(msgspec.Struct, omit_defaults=True):
    """The ids as 32-bit integers, for a pair also where its second text begins, or the rendered
    text, or a drawing as JSON, or why there is none: more than `num_tokens` tokens, or an error at
    `parameter`.
    """

    ids: bytes = b""
    second_text_at: int | None = None
    text: str | None = None
    num_tokens: int | None = None
    error: str | None = None
    parameter: str | None = None


def answer_to(tokenizer: Tokenizer | None, data: bytes | bytearray) -> TextAnswer:
    """Do one task, which is sent as MessagePack."""
    try:
        task = _decoder.decode(data)
        if isinstance(task, DrawTask):
            from quire.text.markup import draw  # its packages are imported with it

            drawing = draw(task.text, is_whole=task.is_whole)
            return TextAnswer(text=to_json(drawing).decode())
        assert tokenizer is not None, "the process that only draws gets no other tasks"
        if isinstance(task, RenderTask):
            join = task.join_pictures
            text = render_chat(tokenizer, task.messages, join_pictures=join, **task.options)
            return TextAnswer(text=text)
        if isinstance(task, PairTask):
            ids, second_text_at = task.encoded(tokenizer)
            return TextAnswer(_packed(ids), second_text_at)
        return _encoded(tokenizer, task)
    except RequestError as error:
        return TextAnswer(error=error.described(json_or_repr), parameter=error.parameter)
    except MemoryError:
        return TextAnswer(error="This text takes too much memory; send a shorter one.")
    except Exception as error:  # what ends this process would be told as lack of memory
        text = f"{type(error).__name__}: {text_of(error)}"
        return TextAnswer(error=f"The text cannot be worked on: {text}")


def _encoded(tokenizer: Tokenizer, task: EncodeTask) -> TextAnswer:
    # a beginning that is too long already settles it, at a cost that follows from the limit and not
    # from the text
    if task.limit is not None and len(task.text) > _BEGINNING * task.limit:
        num = len(tokenizer.encode(task.text[: _BEGINNING * task.limit], add_special_tokens=False))
        # A token may reach across the cut: the rest is not added, and a part is taken off.
        if num * 4 // 5 >= task.limit:
            return TextAnswer(num_tokens=num * 4 // 5)
    ids = task.encoded(tokenizer)
    if len(ids) > task.most_listed:
        text = f"The text has {len(ids)} tokens, and a reply lists at most {task.most_listed}."
        return TextAnswer(error=text, parameter="prompt")
    return TextAnswer(_packed(ids))


def _packed(ids: list[int]) -> bytes:
    return array.array("I", ids).tobytes()


def _run(start: TextStart, pipe: socket.socket) -> int:
    """Do tasks until the pipe is closed; the exit code."""
    # streams come first: nobody waits for a long text in milliseconds
    lower_priority()
    tokenizer: Tokenizer | None = None
    if start.tokenizer_folder is None:
        from quire.text.markup import draw

        draw("a", is_whole=True)  # what it imports is not part of a task
    else:
        tokenizer = Tokenizer.from_folder(Path(start.tokenizer_folder), mode=start.mode)
        tokenizer.encode("a")

    def answer(data: bytearray, fds: list[int]) -> bytes:
        return to_msgpack(answer_to(tokenizer, data))

    return serve_tasks(pipe, start, answer)


def raise_failure(answer: TextAnswer, limit: int | None) -> None:
    """Raise the RequestError of an answer that is one."""
    if answer.num_tokens is not None:
        raise PromptTooLong(answer.num_tokens, limit or 0, is_estimate=True)
    if answer.error is not None:
        raise RequestError(answer.error, parameter=answer.parameter)


PROGRAM = ChildProgram(TextStart, lambda start: "TextProcess", _run)
