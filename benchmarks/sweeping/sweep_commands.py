"""The command lines of a sweep: what starts the server, what puts the load on it, and where."""

from __future__ import annotations

import argparse
import shlex
import socket
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sweeping.sweep_grid import ParameterSet
from quire.errors import InvalidParameter


@dataclass(frozen=True)
class Commands:
    """The words of the commands, and where the server answers."""

    serve: list[str]
    bench: list[str]
    after: list[str]
    url: str

    @classmethod
    def of(cls, args: argparse.Namespace, served: Sequence[ParameterSet]) -> Commands:
        """A server that is given no port gets a free one; the load is told where it is."""
        serve, bench = _words(args.serve_cmd), _words(args.bench_cmd)
        url = _value(bench, "--base-url")
        port = _value(serve, "--port") or _value(bench, "--port")
        ports = {one.values["port"] for one in served if "port" in one.values}
        if url is None and (port or ports):
            if ports:
                raise InvalidParameter("--serve-params", "port", "it belongs into --serve-cmd")
            url = f"http://127.0.0.1:{port}"
        if url is None:
            port = str(_free_port())
            url, serve = f"http://127.0.0.1:{port}", [*serve, "--port", port]
        after = [] if args.after_bench_cmd is None else _words(args.after_bench_cmd)
        return cls(serve, bench, after, url.rstrip("/"))

    def server_words(self, server: ParameterSet) -> list[str]:
        """What starts the server with these parameters."""
        return [*self.serve, *server.words()]

    def load_words(self, load: ParameterSet, number: int) -> list[str]:
        """What puts the load on it. Runs at one server send different prompts, so that none finds
        those of another in the prefix cache; the same run at another server sends the same ones.
        """
        words = [*self.bench, *load.words()]
        if _value(words, "--base-url") is None:
            words += ["--base-url", self.url]
        if _value(words, "--seed") is None:
            words += ["--seed", str(zlib.crc32(f"{load.name} {number}".encode()) % 10**6)]
        return words

    def folder_of(self, server: ParameterSet) -> str:
        """The folder for this server's results; its port does not matter to them."""
        return server.folder(_without_port(self.serve))


def _words(command: str) -> list[str]:
    """A command line as words; `quire` means this installation."""
    words = shlex.split(command)
    if not words:
        raise InvalidParameter("--serve-cmd, --bench-cmd", command, "a command must be named")
    return [sys.executable, "-m", *words] if words[0] == "quire" else words


def _value(words: Sequence[str], flag: str) -> str | None:
    """The value of `flag` in a command line; None if it is not there."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


def _without_port(words: Sequence[str]) -> list[str]:
    """What of the command a result depends on."""
    if "--port" not in words:
        return list(words)
    at = list(words).index("--port")
    return [*words[:at], *words[at + 2 :]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
