"""Attacks on a running server: how long others wait, and how much memory it takes.

`python benchmarks/hostile.py [ATTACK ...]` starts `quire serve` for each attack, sends it while a
probe asks `/health` every few milliseconds, and prints one line for each size of body: the reply,
how long it took, how long the probe waited (p50, p99 and the longest), and the peak of the resident
memory of all processes together. `--list` names the attacks.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

WORDS = "the quick brown fox jumps over the lazy dog and runs away\n"
PROBE_EVERY_S = 0.005
REPLY_S = 600.0
SERVER = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "64M", "--dtype", "float32")
HEADER = (
    f"{'attack':<16}{'MB':>4} {'load':<5}{'reply':<28}{'s':>7}"
    f"{'p50':>8}{'p99':>8}{'max ms':>9}{'peak MiB':>10}"
)

Body = Callable[[int], bytes]
"""Makes a body of about so many bytes."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Bodies for a route; `flags` are what the server is started with in addition."""

    path: str
    body: Body
    flags: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 4, 8, 30)


ATTACKS: dict[str, Attack] = {}


def text(num_bytes: int) -> str:
    """Plain words."""
    return (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]


def of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def register() -> None:
    """Fill `ATTACKS`: texts to every route that tokenizes, then bodies that are hard to read."""

    def chat(content: object) -> bytes:
        return of(messages=[{"role": "user", "content": content}], max_tokens=1)

    add = ATTACKS.__setitem__
    add("none", Attack("/v1/completions", lambda n: of(prompt="a", max_tokens=200)))
    add("completions", Attack("/v1/completions", lambda n: of(prompt=text(n), max_tokens=1)))
    add("chat", Attack("/v1/chat/completions", lambda n: chat(text(n))))
    add("responses", Attack("/v1/responses", lambda n: of(input=text(n))))
    add("input_tokens", Attack("/v1/responses/input_tokens", lambda n: of(input=text(n))))
    add("messages", Attack("/v1/messages", lambda n: chat(text(n))))
    add("count_tokens", Attack("/v1/messages/count_tokens", lambda n: of(
        messages=[{"role": "user", "content": text(n)}])))  # fmt: skip
    add("tokenize", Attack("/tokenize", lambda n: of(prompt=text(n))))
    add("render", Attack("/v1/completions/render", lambda n: of(prompt=text(n))))
    add("spaces", Attack("/tokenize", lambda n: of(prompt=" " * n)))
    add("one_word", Attack("/tokenize", lambda n: of(prompt="a" * n)))
    add("truncated", Attack("/v1/completions", lambda n: of(
        prompt=text(n), max_tokens=1, truncate_prompt_tokens=8)))  # fmt: skip
    add("bad_words", Attack("/v1/completions", lambda n: of(
        prompt="a", max_tokens=1, bad_words=[text(n)])))  # fmt: skip
    add("batch", Attack("/v1/completions", lambda n: of(
        prompt=[text(n // 128)] * 128, max_tokens=1)))  # fmt: skip
    add("messages_of_1MB", Attack("/v1/chat/completions", lambda n: of(
        messages=[{"role": "user", "content": text(2**20)}] * max(1, n >> 20), max_tokens=1
    )))  # fmt: skip
    add("parts", Attack("/v1/chat/completions", lambda n: chat(
        [{"type": "text", "text": "a"}] * (n // 33))))  # fmt: skip
    add("ids", Attack("/v1/completions", lambda n: of(prompt=[1] * (n // 3), max_tokens=1)))
    add("detokenize", Attack("/detokenize", lambda n: of(tokens=[1000] * (n // 6))))
    add("numbers", Attack("/v1/completions", _numbers, sizes=(1, 4)))
    add("lists", Attack("/v1/completions", lambda n: of(prompt=[[]] * (n // 4), max_tokens=1)))
    trusting = ("--trust-request-chat-template",)
    for name, template in TEMPLATES.items():
        made = of(messages=[{"role": "user", "content": "a"}], chat_template=template)
        add(name, Attack("/v1/chat/completions", lambda n, made=made: made, trusting, (1,)))


TEMPLATES = {
    "template_width": "{{ '%0999999999d' % 1 }}",
    "template_join": "{% set x = 'a' * 9999999 %}{{ range(1000) | map('string') | join(x) }}",
    "template_double": (
        "{% set n = namespace(x='a' * 9999999) %}"
        "{% for i in range(12) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}"
    ),
    "template_replace": "{% set x = 'a' * 99999 %}{{ x | replace('a', x) | length }}",
}


def _numbers(num_bytes: int) -> bytes:
    """Numbers that are slow to read."""
    return b'{"max_tokens":1,"prompt":[' + b"1e300," * (num_bytes // 6) + b"1]}"


@dataclass
class Watch:
    """What the probe and the sampler saw."""

    waits_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    is_over: bool = False

    def percentile(self, share: float) -> float:
        """A wait in milliseconds that `share` of the probes did not pass."""
        ordered = sorted(self.waits_s) or [float("nan")]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return http.client.HTTPConnection(self.host, self.port, timeout=REPLY_S)


class Server:
    """`quire serve` in a process of its own, at a port that the system chooses."""

    def __init__(self, model: str | None, flags: Sequence[str]) -> None:
        named = [] if model is None else [model]
        command = [sys.executable, "-m", "quire.cli.main", "serve", *named, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *SERVER, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            text=True, errors="replace",
        )  # fmt: skip
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"Serving .* at http://([\d.]+):(\d+)", line):
                self.address = Address(found[1].replace("0.0.0.0", "127.0.0.1"), int(found[2]))
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=lambda: list(self.process.stderr or ()), daemon=True).start()

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return self.address.connect()

    def resident_bytes(self) -> int:
        """What all its processes hold together."""
        total = 0
        root = psutil.Process(self.process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def post(server: Server | Address, path: str, body: bytes) -> str:
    """Send a body; the status and the code of the error, in words."""
    connection = server.connect()
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()
    if reply.status == 200:
        return "200"
    try:
        error = json.loads(data)["error"]
        return f"{reply.status} {error.get('code') or error['type']}"[:27]
    except (ValueError, KeyError):
        return f"{reply.status} {data[:20]!r}"[:27]


@contextlib.contextmanager
def watching(server: Server) -> Iterator[Watch]:
    """Probe `/health` and sample the memory for a block."""
    watch = Watch()

    def probe() -> None:
        connection = server.connect()
        while not watch.is_over:
            start = time.perf_counter()
            while True:
                try:
                    connection.request("GET", "/health")
                    connection.getresponse().read()
                    break
                except (OSError, http.client.HTTPException):  # an idle connection was closed
                    connection.close()
            watch.waits_s.append(time.perf_counter() - start)
            time.sleep(PROBE_EVERY_S)
        connection.close()

    def sample() -> None:
        while not watch.is_over:
            watch.peak_bytes = max(watch.peak_bytes, server.resident_bytes())
            time.sleep(0.02)

    threads = [threading.Thread(target=work) for work in (probe, sample)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.3)
        yield watch
        time.sleep(0.3)
    finally:
        watch.is_over = True
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def loaded(server: Server, num_streams: int) -> Iterator[None]:
    """Keep `num_streams` streams of completions going for a block."""
    is_over = threading.Event()
    body = of(prompt="def add(", max_tokens=1500, ignore_eos=True, stream=True)

    def stream() -> None:
        while not is_over.is_set():
            connection = server.connect()
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            while not is_over.is_set() and reply.read1(65536):
                continue
            connection.close()

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)


def run(name: str, sizes: Sequence[int], num_streams: int, model: str | None) -> None:
    """One attack at every size, on one server; prints its lines."""
    attack = ATTACKS[name]
    server = Server(model, attack.flags)
    try:
        post(server, "/v1/completions", of(prompt="a", max_tokens=1))
        with loaded(server, num_streams):
            for size in [size for size in sizes if size in attack.sizes]:
                body = attack.body(size << 20)
                with watching(server) as watch:
                    start = time.perf_counter()
                    reply = post(server, attack.path, body)
                    taken_s = time.perf_counter() - start
                print(
                    f"{name:<16}{size:>4} {'yes' if num_streams else 'no':<5}{reply:<28}"
                    f"{taken_s:>7.2f}{watch.percentile(0.5):>8.1f}{watch.percentile(0.99):>8.1f}"
                    f"{watch.percentile(1.0):>9.1f}{watch.peak_bytes >> 20:>10}",
                    flush=True,
                )
    finally:
        server.stop()


def main() -> None:
    """Run what the command line asks for."""
    register()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", help="all of them if none is named")
    parser.add_argument("--list", action="store_true", help="name the attacks")
    parser.add_argument("--model", help="the embedded model if it is left out")
    parser.add_argument("--sizes", default="1,4,8,30", help="MB of the body, with commas")
    parser.add_argument("--streams", type=int, default=0, help="streams that run meanwhile")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:<18}{ATTACKS[name].path}" for name in ATTACKS))
        return
    print(HEADER, flush=True)
    for name in args.attacks or ATTACKS:
        run(name, [int(size) for size in args.sizes.split(",")], args.streams, args.model)


if __name__ == "__main__":
    main()
