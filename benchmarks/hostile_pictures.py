"""Text streams beside hostile pictures: is the 99th percentile of their gaps that of the same
streams beside plain requests?

    python -m benchmarks.hostile_pictures --seconds 20

32 streams draw text while 32 clients, in a process of their own, send one request after the other:
plain ones, then requests with pictures that have to be refused (bombs, torn files, 10,000 of them,
private addresses and names of such, files, placeholders typed as text), in turns, so that what else
the machine does meets both. Then pictures that are answered. A second server is allowed to fetch
from this machine, where pictures come slowly, never, or from elsewhere by redirects. Every reply is
looked at.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks.hostile import Address, Server, of, post
from benchmarks.picture_encoder import jpeg, write_model
from quire.bench.report import add_output_flag, at_least, conclude
from quire.config.args.command_line import QuireParser

MOST = 1.2
"""Of the gaps beside plain requests."""
ROUNDS = 4
FLAGS = ("--max-num-seqs", "96", "--max-model-len", "1024", "--served-model-name", "m")
TEMPLATE = "{% for m in messages %}{{ m.content }} w9 {% endfor %}"
CHAT = "/v1/chat/completions"
SLOW_S = 2.0
"""Between two bytes of a slow server, which is given up before."""
NAMED_PRIVATE = "localhost"
"""A name of an address that is not of the internet."""


class Part(NamedTuple):
    """The gaps of streams beside one kind of requests, and the replies to these."""

    gaps: list[float]
    replies: Counter[str]


def main(words: Sequence[str] | None = None) -> int:
    """Measure as the command line says; the exit code says whether the promise holds."""
    parser = QuireParser(prog="python -m benchmarks.hostile_pictures", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind of requests")
    parser.add_argument("--streams", type=at_least(1), default=32)
    parser.add_argument("--clients", type=at_least(1), default=32)
    parser.add_argument("--layers", type=at_least(2), default=4, help="of the encoder")
    add_output_flag(parser)
    args = parser.parse_args(words)
    figures: dict[str, float | int | str] = {}
    failures: list[str] = []
    args.web_port = start_web()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), torch.float32, args.layers)
        (Path(folder) / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
        flags = (*FLAGS, "--chat-template", f"{folder}/template.jinja")
        for start, kind in ((Server, "hostile"), (near_web, "web")):
            server = start(folder, flags)
            try:
                compare(server, kind, args, figures, failures)
                if kind == "hostile":
                    tell("pictures", beside(server, "pictures", args.seconds, args), figures)
            finally:
                server.stop()
    return conclude(figures, failures, args.output_json)


def compare(
    server: Server,
    kind: str,
    args: argparse.Namespace,
    figures: dict[str, float | int | str],
    failures: list[str],
) -> None:
    """Measure streams beside plain requests and beside those of a kind that is refused."""
    plain, refused = Part([], Counter()), Part([], Counter())
    for _ in range(ROUNDS):
        for name, part in (("plain", plain), (kind, refused)):
            found = beside(server, name, args.seconds / ROUNDS, args)
            part.gaps.extend(found.gaps)
            part.replies.update(found.replies)
    tell(f"plain_with_{kind}", plain, figures)
    tell(kind, refused, figures)
    if not all(reply == "200" for reply in plain.replies):
        failures.append(f"other replies than 200 to plain requests: {plain.replies}")
    is_refused = [reply.startswith("4") or reply == "500 500" for reply in refused.replies]
    if not all(is_refused):
        failures.append(f"other replies to {kind} requests: {refused.replies}")
    ratio = p99(refused.gaps) / p99(plain.gaps)
    figures[f"{kind}_ratio_of_p99"] = ratio
    if ratio > MOST:
        failures.append(f"p99 beside {kind} requests is {ratio:.2f} of that beside plain ones")


def tell(name: str, part: Part, figures: dict[str, float | int | str]) -> None:
    """Put the figures of a part with the others."""
    figures[f"{name}_p50_ms"] = float(np.percentile(part.gaps, 50)) * 1e3
    figures[f"{name}_p99_ms"] = p99(part.gaps) * 1e3
    figures[f"{name}_longest_ms"] = max(part.gaps) * 1e3
    figures[f"{name}_replies"] = ", ".join(f"{n} x {r}" for r, n in sorted(part.replies.items()))


def p99(gaps: Sequence[float]) -> float:
    """The 99th percentile, in seconds."""
    return float(np.percentile(gaps, 99))


def beside(server: Server, kind: str, seconds: float, args: argparse.Namespace) -> Part:
    """The gaps of streams beside requests of a kind, and the replies to those."""
    gaps: list[float] = []
    is_over, lock = threading.Event(), threading.Lock()
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    asking = spawned.Process(
        target=ask_all, args=(server.address, kind, args.web_port, args.clients, theirs)
    )
    asking.start()
    ours.recv()

    def read() -> None:
        while not is_over.is_set():
            found = stream_gaps(server, is_over)
            with lock:
                gaps.extend(found)

    threads = [threading.Thread(target=read) for _ in range(args.streams)]
    for thread in threads:
        thread.start()
    ours.send("begin")
    time.sleep(seconds)
    is_over.set()
    ours.send("end")
    for thread in threads:
        thread.join()
    replies = ours.recv()
    asking.join()
    return Part(gaps, replies)


def ask_all(
    address: Address, kind: str, web_port: int, num_clients: int, pipe: connection.Connection
) -> None:
    """The process of the clients: it sends requests from when it is told to until it is told to
    stop, and then the replies that it got.
    """
    bodies = web(web_port) if kind == "web" else KINDS[kind]()
    replies: Counter[str] = Counter()
    is_over, lock = threading.Event(), threading.Lock()

    def ask() -> None:
        while not is_over.is_set():
            with lock:
                body = next(bodies)
            reply = post(address, CHAT, body)
            with lock:
                replies[reply] += 1

    pipe.send("ready")
    pipe.recv()
    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    pipe.recv()
    is_over.set()
    for thread in threads:
        thread.join()
    pipe.send(replies)


def stream_gaps(server: Server, is_over: threading.Event) -> list[float]:
    """Seconds between the pieces of one stream."""
    body = of(model="m", prompt="w1 w2", max_tokens=500, ignore_eos=True, stream=True)
    connection = server.connect()
    found: list[float] = []
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        last = None
        for line in reply:
            if is_over.is_set():
                break
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    found.append(now - last)
                last = now
    except (OSError, http.client.HTTPException) as error:
        raise SystemExit(f"a stream was cut: {error!r}") from None
    finally:
        connection.close()
    return found


def chat(*parts: object) -> bytes:
    """A request for four tokens."""
    message = {"role": "user", "content": list(parts)}
    return of(model="m", messages=[message], max_tokens=4, ignore_eos=True)


def plain() -> Iterator[bytes]:
    """Requests of text."""
    return itertools.repeat(chat({"type": "text", "text": "w1 w2 w3"}))


def hostile() -> Iterator[bytes]:
    """One of each kind, again and again."""
    torn = jpeg(1)[:700]
    tall = bomb(30_000, 30_000)
    many = [shown(jpeg(2))] * 10_000
    return itertools.cycle(
        [
            chat(shown(torn)),
            chat(shown(tall, "png")),
            chat(shown(b"\x89PNG\r\n\x1a\n" + bytes(1000), "png")),
            chat(linked("http://10.0.0.1/a.png")),
            chat(linked("http://[::ffff:127.0.0.1]/a.png")),
            chat(linked(f"http://{NAMED_PRIVATE}/a.png")),
            chat(linked("file:///etc/passwd")),
            chat({"type": "text", "text": "<image> <image>"}, shown(jpeg(3))),
            chat(*({"type": "image_url", "image_url": {"url": "data:,"}} for _ in many)),
        ]
    )


def pictures() -> Iterator[bytes]:
    """Pictures that nobody has seen."""
    return (chat(shown(jpeg(seed)), {"type": "text", "text": "w1"}) for seed in itertools.count(10))


def web(port: int) -> Iterator[bytes]:
    """Pictures that are somewhere else, one of each kind again and again."""
    paths = ("slow", "silent", "loop", "away", "file", "endless", "404")
    return itertools.cycle([chat(linked(f"http://127.0.0.1:{port}/{path}")) for path in paths])


class Web(BaseHTTPRequestHandler):
    """A web server that harms whoever fetches from it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer by the path."""
        name = self.path[1:]
        targets = {"loop": self.path, "away": f"http://{NAMED_PRIVATE}/", "file": "file:///etc/a"}
        self.close_connection = True
        with contextlib.suppress(OSError):
            if name in targets:
                self.send_response(302)
                self.send_header("Location", targets[name])
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif name == "silent":
                time.sleep(2 * SLOW_S)
            elif name in ("slow", "endless"):
                self.send_response(200)
                self.end_headers()
                for _ in range(4 if name == "slow" else 100):
                    self.wfile.write(bytes(1 if name == "slow" else 2**20))
                    time.sleep(SLOW_S if name == "slow" else 0.0)
            else:
                self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def start_web() -> int:
    """Have `Web` answer; its port."""
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    return listening.server_port


def near_web(folder: str, flags: Sequence[str]) -> Server:
    """A server that may fetch from 127.0.0.1, where `Web` listens, and from no other name."""
    os.environ |= {
        "QUIRE_MEDIA_ALLOW_PRIVATE": "1",
        "QUIRE_IMAGE_FETCH_TIMEOUT": "1",
        "QUIRE_MAX_MEDIA_DOWNLOAD_SIZE_MB": "8",
    }
    return Server(folder, (*flags, "--allowed-media-domains", "127.0.0.1"))


KINDS = {"plain": plain, "hostile": hostile, "pictures": pictures}


def linked(url: str) -> dict[str, object]:
    """A part of a message that has a URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def shown(data: bytes, kind: str = "jpeg") -> dict[str, object]:
    """A part of a message."""
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes that says it is large."""
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
