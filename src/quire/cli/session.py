"""The engine of commands that generate: opens it by the flags, streams one answer at a time."""

from __future__ import annotations

import argparse
from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from quire.cli.answers import Piece, Pieces
from quire.config.args.command_line import add_options
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import options_of
from quire.errors import EngineGenerateError

FIRST_ENGINE_FLAGS = ("model", "dtype", "quantization", "max_model_len", "device", "seed")
"""The flags that the help of a command with a model lists without being asked for more."""

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.outputs import RequestOutput


def add_engine_flags(
    parser: argparse.ArgumentParser,
    kind: type[EngineArgs] = EngineArgs,
    without: Container[str] = (),
) -> None:
    """The flags of the engine but for the names in `without`, and `--explain`."""
    parser.add_argument(
        "--explain", action="store_true", help="print the plan of the engine with reasons, and stop"
    )
    add_options(parser, kind, only=[name for name in options_of(kind) if name not in without])


def explain(args: argparse.Namespace, kind: type[EngineArgs] = EngineArgs) -> int:
    """Print what the engine flags come to on this machine."""
    print(kind.from_cli_args(args).create_engine_config().explain(), end="")
    return 0


class Session:
    """One engine in this process. Close it, or use it as a context manager."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_requests = 0

    @classmethod
    def open(cls, args: argparse.Namespace) -> Self:
        from quire.engine.llm_engine import LLMEngine

        engine_args = EngineArgs.from_cli_args(args)
        engine_args.disable_log_stats = True
        return cls(LLMEngine.from_engine_args(engine_args))

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Fields of SamplingParams that the model's files set."""
        return dict(self._engine.front_end.sampling_defaults)

    def stream(
        self,
        prompt: Any,
        sampling: Mapping[str, Any],
        *,
        is_delta: bool,
        add_special_tokens: bool = True,
    ) -> Generator[RequestOutput, None, None]:
        """Outputs as they come: new text only (`is_delta`), or one at the end.

        Raises EngineGenerateError after the last output if a completion ended with an error.
        Closing the iterator ends the generation. Ctrl-C aborts the request after the step that is
        running: the last output, with what was generated until then, is followed by the
        KeyboardInterrupt.
        """
        from quire.engine.frontend.output_processor import failure_of
        from quire.engine.offline import DeferredInterrupt
        from quire.params import RequestOutputKind, SamplingParams

        kind = RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**{**sampling, "output_kind": kind})
        name = str(self._num_requests)
        self._num_requests += 1
        options = {"add_special_tokens": add_special_tokens}
        self._engine.add_request(name, prompt, params, tokenization_kwargs=options)
        failure = None
        try:
            with DeferredInterrupt() as interrupt:
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        failure = failure or failure_of(output)
                        yield output
                    interrupt.check()
        except KeyboardInterrupt:
            self._engine.abort_request(name)
            # the step after the abort gives the last output
            yield from self._engine.step()
            raise
        finally:
            # also where the caller has closed the generator: the next answer begins with an empty
            # engine
            self._engine.discard_all()
        if failure is not None:
            raise EngineGenerateError(failure)

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Pieces:
        prompt = self.render(messages)
        return _pieces(self.stream(prompt, sampling, is_delta=True, add_special_tokens=False))

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Pieces:
        return _pieces(self.stream(prompt, sampling, is_delta=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """The prompt that the model's chat template makes of a conversation."""
        from quire.text.chat import render_chat

        front_end = self._engine.front_end
        template, tokenizer = front_end.chat_template, self._engine.get_tokenizer()
        render = partial(render_chat, tokenizer, chat_template=template)
        return front_end.inputs.chat_prompt(messages, render)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _pieces(outputs: Generator[RequestOutput, None, None]) -> Pieces:
    with closing(outputs):
        for output in outputs:
            yield Piece(output.outputs[0].text, len(output.outputs[0].token_ids))
