"""Talk to a model in this process, or to one on a server (--url).

Answers stream; Ctrl-C ends an answer, Ctrl-D the talk. Lines that begin with a slash are commands:
/reset, /undo, /system TEXT, /image FILE, /history, /help, /quit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cli.answers import (
    PASSING,
    Answer,
    Message,
    Model,
    go_on_after,
    lines,
    raise_interrupt,
    show,
)
from quire.cli.model_choice import add_answer_flags, open_model
from quire.cli.pictures import add_image_flag, asked_with, picture_part, shown
from quire.cli.session import explain
from quire.config.args.command_line import QuireParser

_MAX_TOKENS = 512
_HELP = """\
/reset         forget the talk (the system prompt stays)
/undo          forget the last question and its answer
/system TEXT   set the system prompt and forget the talk; without TEXT there is none
/image FILE    send a picture with the next question
/history       print the talk
/help          print this
/quit          end (as Ctrl-D does)
"""


def add_arguments(parser: QuireParser) -> None:
    """The flags of `quire chat`."""
    parser.usage = "quire chat [flags]"
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told first")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this one question and stop")
    add_image_flag(parser, "send a picture with the first question; may be repeated")
    add_answer_flags(parser, ("quick", "system_prompt", "image"))


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends, or with --explain print the plan."""
    if args.explain:
        return explain(args)
    with open_model(args, _MAX_TOKENS) as (model, sampling):
        talk = Talk(model, sampling, args.system_prompt, stats=args.stats)
        for file in args.image:
            talk.add_picture(file)
        if args.quick is not None:
            raise_interrupt(talk.ask(args.quick))
            return 0
        return converse(talk)


class Talk:
    """A conversation and its model. `messages` grow by a question and an answer at a time."""

    def __init__(
        self, model: Model, sampling: Mapping[str, Any], system: str | None, *, stats: bool = False
    ) -> None:
        self._model, self._sampling, self._stats = model, sampling, stats
        self.messages: list[Message] = []
        self._pictures: list[dict[str, Any]] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Start over with a system prompt, or without one."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def undo(self) -> bool:
        """Forget the last question and answer; False if there is no answer yet."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        del self.messages[-2:]
        return True

    def add_picture(self, file: Path) -> None:
        """Send a picture with the next question. Raises InvalidParameter for another file."""
        self._pictures.append(picture_part(file))

    def ask(self, question: str) -> Answer:
        """Put a question and print the answer as it comes.

        An interrupted answer is kept as far as it got. After an error the question is forgotten,
        with its pictures.
        """
        # taken out first, so that pictures which the model refuses are not sent with each later
        # question
        pictures, self._pictures = self._pictures, []
        messages = [*self.messages, {"role": "user", "content": asked_with(question, pictures)}]
        answer = show(self._model.chat(messages, self._sampling), stats=self._stats)
        # only after the answer: a question that failed leaves no trace
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def converse(talk: Talk) -> int:
    """Read lines until the input ends or /quit."""
    for typed in lines("Ask something. /help lists the commands."):
        line = typed.strip()
        if line == "/quit":
            break
        if line:
            _serve(talk, line)
    return 0


def _serve(talk: Talk, line: str) -> None:
    """Handle one line, a command or a question. Errors are printed, and the talk continues."""
    try:
        if line.startswith("/"):
            obey(talk, line)
        else:
            go_on_after(talk.ask(line))
    except PASSING as error:
        print(f"({error} The talk so far is kept; /reset or /undo makes room.)", file=sys.stderr)


def obey(talk: Talk, line: str) -> None:
    """Run a command of the talk."""
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.reset()
    elif name == "/undo":
        print("Forgotten." if talk.undo() else "There is nothing to forget.")
    elif name == "/system":
        talk.set_system(rest.strip() or None)
    elif name == "/image":
        talk.add_picture(Path(rest.strip()))
    elif name == "/history":
        for message in talk.messages:
            print(f"[{message['role']}] {shown(message['content'])}")
    elif name == "/help":
        print(_HELP, end="")
    else:
        print(f"There is no command {name}. /help lists them.")
