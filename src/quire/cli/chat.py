"""Talk to a model.

Answers stream; Ctrl-C ends an answer, Ctrl-D the talk. Lines that begin with a slash are commands:
/reset, /undo, /system TEXT, /history, /help, /quit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from quire.cli.generate import with_defaults
from quire.cli.sampling_flags import add_sampling_flags, given_sampling
from quire.cli.session import Session, add_engine_flags, explain
from quire.errors import RequestError

_MAX_TOKENS = 512
_HELP = """\
/reset         forget the talk (the system prompt stays)
/undo          forget the last question and its answer
/system TEXT   set the system prompt and forget the talk; without TEXT there is none
/history       print the talk
/help          print this
/quit          end (as Ctrl-D does)
"""


class Model(Protocol):
    """What a talk needs of a session."""

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a conversation."""
        ...

    def stream(
        self,
        prompt: str,
        sampling: dict[str, Any],
        *,
        is_delta: bool,
        add_special_tokens: bool = True,
    ) -> Iterator[Any]:
        """Outputs with new text."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire chat`."""
    parser.usage = "quire chat [flags]"
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told first")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this one question and stop")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends, or with --explain print the plan."""
    if args.explain:
        return explain(args)
    given = given_sampling(args)
    with Session.open(args) as session:
        sampling = with_defaults(given, session.sampling_defaults, _MAX_TOKENS)
        talk = Talk(session, {**sampling, "n": 1}, args.system_prompt)
        if args.quick is not None:
            talk.ask(args.quick)
            return 0
        return converse(talk)


class Talk:
    """A conversation and its model. `messages` grow by a question and an answer at a time."""

    def __init__(self, model: Model, sampling: dict[str, Any], system: str | None) -> None:
        self._model, self._sampling = model, sampling
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Begin anew with a system prompt, or without one."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def undo(self) -> bool:
        """Forget the last question and answer; False if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        del self.messages[-2:]
        return True

    def ask(self, question: str) -> None:
        """Put a question and print the answer as it comes.

        An interrupted answer is kept as far as it got. After a RequestError the question is
        forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self._model.render(messages)
        answer = self._print_answer(prompt)
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _print_answer(self, prompt: str) -> str:
        pieces: list[str] = []
        outputs = self._model.stream(
            prompt, self._sampling, is_delta=True, add_special_tokens=False
        )
        try:
            for output in outputs:
                pieces.append(output.outputs[0].text)
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
        except KeyboardInterrupt:
            pieces.append("")
        sys.stdout.write("\n")
        return "".join(pieces)


def converse(talk: Talk) -> int:
    """Read lines until the input ends or /quit."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (its import gives input() line editing)

        print("Ask something. /help lists the commands.")
    while True:
        try:
            line = (input("> ") if is_terminal else input()).strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line:
            _serve(talk, line)


def _serve(talk: Talk, line: str) -> None:
    """One line: a command or a question. What cannot be served is said, and the talk goes on."""
    try:
        if line.startswith("/"):
            obey(talk, line)
        else:
            talk.ask(line)
    except RequestError as error:
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
    elif name == "/history":
        for message in talk.messages:
            print(f"[{message['role']}] {message['content']}")
    elif name == "/help":
        print(_HELP, end="")
    else:
        print(f"There is no command {name}. /help lists them.")
