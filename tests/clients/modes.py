"""How the modules of clients are read and run: a mode is a public function `mode(url, model)` of a
module, which raises where the server or the client does not do what it should.
"""

import argparse
import importlib
import inspect
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

TIME_LIMIT_S = 300
"""Of one mode; on a busy machine Open WebUI takes minutes to start."""


class Unsupported(Exception):
    """Raised by a mode that the client, not the server, does not allow; says why."""


@dataclass(frozen=True)
class Outcome:
    """One row of the table: `result` is "ok", "client" (the fault is not the server's) or
    "failed"; `detail` says why it is not "ok".
    """

    mode: str
    result: str
    detail: str = ""
    seconds: float = 0.0


def modes_of(module: ModuleType) -> list[Callable[[str, str], Any]]:
    """A module's public functions of `url` and `model`, in the order of its source."""
    found = inspect.getmembers(module, inspect.isfunction)
    mine = [
        function
        for name, function in found
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and list(inspect.signature(function).parameters) == ["url", "model"]
    ]
    return sorted(mine, key=lambda function: function.__code__.co_firstlineno)


def run_mode(mode: Callable[[str, str], Any], url: str, model: str) -> Outcome:
    """Run a mode with a time limit (SIGALRM: main thread only)."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no end after {TIME_LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIME_LIMIT_S)
    start = time.monotonic()
    result, detail = "ok", ""
    try:
        mode(url, model)
    except Unsupported as reason:
        result, detail = "client", str(reason)
    except BaseException as error:
        if os.environ.get("TRACEBACKS"):
            traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in where if "tests/clients" in frame.filename]
        result = "failed"
        detail = f"line {own[-1].lineno}: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return Outcome(mode.__name__, result, detail[:1500], round(time.monotonic() - start, 2))


def run_module(name: str, url: str, model: str, chosen: list[str]) -> Iterator[Outcome]:
    module = importlib.import_module(f"tests.clients.python.{name}")
    for mode in modes_of(module):
        if not chosen or mode.__name__ in chosen:
            yield run_mode(mode, url, model)


def main() -> None:
    """`python -m tests.clients.modes MODULE URL MODEL [MODE ...]`: a line of JSON for each mode."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for argument in ("module", "url", "model"):
        parser.add_argument(argument)
    parser.add_argument("mode", nargs="*")
    given = parser.parse_args()
    for outcome in run_module(given.module, given.url, given.model, given.mode):
        print("\nOUTCOME " + json.dumps(asdict(outcome)), flush=True)  # on a line of its own
    os._exit(0)  # threads that clients leave


if __name__ == "__main__":
    main()
