"""Attacks on the processes of a server: signals, limits, full disks, clocks.

    python -m benchmarks.hostile_processes [ATTACK ...] [--list]

Each attack starts `quire serve`, harms it while streams run, and prints a line: how many streams
brought the very text of an undisturbed run, whether the server answers afterwards, its exit code
for SIGTERM, and what it left behind (processes, socket folders). `broken` at the end of a line, and
exit code 1, where it should have held. Some need root (`nobody`, `no-shm`, `full-disk`) or
libfaketime (`clock`; its path in FAKETIME_LIB); without it they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from quire.engine.process.socket_folder import make_socket_folder, remove_socket_folder
from tests.server.serve_process import Served, command_of

NUM_STREAMS = 16
MAX_TOKENS = 200
PROMPTS = [f"def f{number}(a, b):" for number in range(NUM_STREAMS)]
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"
ROW = f"{'attack':<34}{'streams':>9}{'after':>7}{'exit':>6}{'left':>6}{'s':>7}"

Harm = Callable[["Victim"], None]


@dataclass
class Victim:
    """A server under attack. `owner`: the process that was started."""

    served: Served
    owner: psutil.Process

    def children(self, word: str) -> list[psutil.Process]:
        """Its processes whose command line has `word`."""
        found = self.owner.children(recursive=True)
        return [child for child in found if word in " ".join(child.cmdline())]

    @property
    def port(self) -> int:
        return int(self.served.url.rpartition(":")[2])


@contextlib.contextmanager
def victim(flags: Sequence[str], wrap: Sequence[str], environ: dict[str, str]) -> Iterator[Victim]:
    """A server whose command is preceded by `wrap`."""
    process = subprocess.Popen(
        [*wrap, *command_of(*flags)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        yield Victim(Served(process), psutil.Process(process.pid))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def text_of(url: str, prompt: str, model: str = "") -> str | None:
    """The text of a stream; None if it did not end well."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    found = ""
    try:
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={**body, "temperature": 0, "stream": True},
            timeout=120,
            verify=False,
        ) as reply:
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    return found
                if line:
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    found += choice["text"]
                    if choice["finish_reason"] not in (None, "length"):
                        return None
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    return None


def left_behind(family: Sequence[psutil.Process], pid: int) -> list[str]:
    """Processes and socket folders of a server that has ended."""
    _, alive = psutil.wait_procs(family, timeout=10)
    remove_socket_folder(make_socket_folder())  # as the next start: it removes those of the dead
    folders = Path(tempfile.gettempdir()).glob(f"quire-sockets-{pid}-*")
    return [*(f"process {each.pid}" for each in alive), *map(str, folders)]


@dataclass(frozen=True)
class Attack:
    """`harm` is done a moment after the streams have begun. `survives`: the server goes on.
    `may_cut`: how many streams may end with a broken connection. `exit_code`: for SIGTERM at the
    end, or how it ends by itself; None: any.
    """

    harm: Harm
    flags: tuple[str, ...] = ()
    survives: bool = True
    may_cut: int = 0
    exit_code: int | None = 0
    wrap: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    before: Harm | None = None


def run(name: str, attack: Attack, right: Sequence[str | None]) -> bool:
    """Do it and print its row; whether all held."""
    began = time.monotonic()
    try:
        with victim(attack.flags, attack.wrap, dict(attack.environ)) as one:
            if attack.before is not None:
                attack.before(one)
            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                texts = [pool.submit(text_of, one.served.url, prompt) for prompt in PROMPTS]
                time.sleep(0.5)
                family = one.owner.children(recursive=True)
                attack.harm(one)
                found = [each.result() for each in texts]
            after = text_of(one.served.url, PROMPTS[0]) == right[0] if attack.survives else False
            family += one.owner.children(recursive=True) if one.owner.is_running() else []
            one.served.process.terminate()
            code = one.served.process.wait(60)
            left = left_behind(list(set(family)), one.owner.pid)
            log = one.served.log
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"{name:<34} {str(error)[-300:]!r} broken", flush=True)
        return False
    num_right = sum(text == good for text, good in zip(found, right, strict=True))
    is_good = after == attack.survives and not left and attack.exit_code in (None, code)
    is_good = is_good and num_right >= NUM_STREAMS - attack.may_cut and "Traceback" not in log
    took_s = time.monotonic() - began
    verdict = "" if is_good else f"  broken {left}\n{log[-1500:]}"
    print(
        f"{name:<34}{num_right:>6}/{NUM_STREAMS}{'ok' if after else '-':>7}{code:>6}"
        f"{len(left):>6}{took_s:>7.1f}{verdict}",
        flush=True,
    )
    return is_good


# attacks


def send(number: signal.Signals, word: str, then: signal.Signals | None = None) -> Harm:
    """The signal to the first process whose command line has `word` ("": the owner)."""

    def harm(one: Victim) -> None:
        process = one.children(word)[0] if word else one.owner
        process.send_signal(number)
        if then is not None:
            time.sleep(1.0)
            process.send_signal(then)

    return harm


def signal_all(one: Victim) -> None:
    for process in one.owner.children(recursive=True):
        process.send_signal(signal.SIGTERM)
    one.owner.send_signal(signal.SIGTERM)


def kill_many(word: str) -> Harm:
    """The process again and again, five times."""

    def harm(one: Victim) -> None:
        for _ in range(5):
            for process in one.children(word)[:1]:
                process.kill()
            time.sleep(0.3)

    return harm


def half_sent(one: Victim) -> None:
    """300 connections that never end their heads; then the core dies."""
    one.slow = []  # type: ignore[attr-defined]
    for _ in range(300):
        sock = socket.create_connection(("127.0.0.1", one.port), timeout=10)
        with contextlib.suppress(OSError):
            sock.sendall(HALF)
        one.slow.append(sock)  # type: ignore[attr-defined]


def tls_attack(one: Victim) -> None:
    """Half handshakes, plain HTTP and noise at the TLS port, held open."""
    one.slow = []  # type: ignore[attr-defined]
    for number in range(300):
        sock = socket.create_connection(("127.0.0.1", one.port), timeout=10)
        with contextlib.suppress(OSError):
            sock.sendall((b"", HALF, b"\x16\x03\x01\x02\x00\x01", os.urandom(64))[number % 4])
        one.slow.append(sock)  # type: ignore[attr-defined]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(20):  # whole handshakes, and nothing after them
        plain = socket.create_connection(("127.0.0.1", one.port), timeout=10)
        one.slow.append(context.wrap_socket(plain))  # type: ignore[attr-defined]


def certificate() -> tuple[str, ...]:
    """The flags of TLS with a new certificate."""
    folder = tempfile.mkdtemp(prefix="hostile-tls-")
    key, cert = f"{folder}/key.pem", f"{folder}/cert.pem"
    subject = ["-subj", "/CN=localhost", "-days", "2", "-keyout", key, "-out", cert]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
    subprocess.run(words, check=True, capture_output=True)
    return ("--ssl-keyfile", key, "--ssl-certfile", cert)


def jump(file: Path) -> Harm:
    """The wall clock forwards by a day, backwards by two, forwards by ten years."""

    def harm(one: Victim) -> None:
        for offset in ("+1d", "-2d", "+10y", "+0"):
            file.write_text(offset)
            time.sleep(0.7)

    return harm


def nothing(one: Victim) -> None:
    """The circumstances are the attack."""


def fill(one: Victim) -> None:
    """Fill the disk of temporary files, then the core dies."""
    root = Path(f"/proc/{one.owner.pid}", "root", "mnt")
    with contextlib.suppress(OSError), open(root / "full", "wb", buffering=0) as file:
        while file.write(bytes(65536)):
            pass
    send(signal.SIGKILL, "core_main")(one)


def attacks() -> dict[str, Attack]:
    """All that can be done here, by name."""
    two = ("--api-server-count", "2")
    found: dict[str, Attack] = {}
    for number in (signal.SIGBUS, signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL, signal.SIGSTOP):
        found[f"core-{number.name}"] = Attack(send(number, "core_main"))
        found[f"api-server-{number.name}"] = Attack(
            send(number, "api_server"), two, may_cut=NUM_STREAMS
        )
    del found["api-server-SIGSTOP"]  # it is noticed after 30 s
    for word, flags in (("core_main", ()), ("api_server", two), ("", ()), ("", two)):
        name = f"{word or 'owner'}-stop-and-go{'-of-two' if flags and not word else ''}"
        found[name] = Attack(send(signal.SIGSTOP, word, signal.SIGCONT), flags)
    for word, flags in (("core_main", ()), ("api_server", two)):
        found[f"{word}-SIGTERM"] = Attack(send(signal.SIGTERM, word), flags)
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        harm = send(number, "")
        kept = {"survives": False, "may_cut": NUM_STREAMS, "exit_code": -number}
        found[f"owner-{number.name}"] = Attack(harm, **kept)
        found[f"owner-of-two-{number.name}"] = Attack(harm, two, **kept)
    found["everybody-SIGTERM"] = Attack(signal_all, survives=False)
    found["everybody-of-two-SIGTERM"] = Attack(signal_all, two, survives=False)
    found["two-cores-SIGTERM"] = Attack(signal_all, ("-dp", "2"), survives=False)
    found["core-five-times"] = Attack(kill_many("core_main"))
    found["api-server-five-times"] = Attack(kill_many("api_server"), two, may_cut=NUM_STREAMS)
    limited = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    found["half-sent"] = Attack(send(signal.SIGKILL, "core_main"), wrap=limited, before=half_sent)
    found["half-sent-of-two"] = Attack(
        send(signal.SIGKILL, "core_main"), two, wrap=limited, before=half_sent
    )
    found["tls"] = Attack(nothing, certificate(), wrap=limited, before=tls_attack)
    if os.geteuid() == 0:
        found.update(as_root())
    if library := os.environ.get("FAKETIME_LIB"):
        file = Path(tempfile.mkdtemp(prefix="hostile-clock-")) / "offset"
        file.write_text("+0")
        settings = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_NO_CACHE": "1",
        }
        environ = tuple(settings.items())
        # under libfaketime time.sleep fails after a jump, which the shutdown needs: any exit code
        found["clock"] = Attack(jump(file), environ=environ, exit_code=None)
        found["clock-of-two"] = Attack(jump(file), two, environ=environ, exit_code=None)
    return found


def as_root() -> dict[str, Attack]:
    """Attacks for which the server is started in other circumstances."""
    found = {}
    inside = ("unshare", "-m", "sh", "-c")
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # not writes
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reads, "env")
    homeless = ("HOME=/nonexistent", "XDG_CACHE_HOME=/nonexistent", "HF_HOME=/nonexistent/hf")
    found["nobody"] = Attack(nothing, wrap=(*nobody, *homeless))
    mount = "mount -t tmpfs -o ro none /dev/shm"
    found["no-shm"] = Attack(nothing, wrap=(*inside, f'{mount}; exec "$@"', "sh"))
    small = 'mount -t tmpfs -o size=256k none /mnt; TMPDIR=/mnt exec "$@"'
    full = f'{small.partition(";")[0]}; cat /dev/zero >/mnt/full; TMPDIR=/mnt exec "$@"'
    found["full-disk-at-start"] = Attack(nothing, wrap=(*inside, full, "sh"))
    for name, flags in (("full-disk", ()), ("full-disk-of-two", ("--api-server-count", "2"))):
        found[name] = Attack(fill, flags, wrap=(*inside, small, "sh"))
    return found


def start_signals(flags: Sequence[str]) -> bool:
    """SIGTERM and SIGINT at many moments of the start; prints a row."""
    wrong, longest, num = [], 0.0, 0
    for number in (signal.SIGTERM, signal.SIGINT):
        after_s = 0.3
        while after_s < 4.0:
            process = subprocess.Popen(command_of(*flags), stderr=subprocess.PIPE, text=True)
            threading.Event().wait(after_s)
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            began = time.monotonic()
            log = process.communicate(timeout=60)[1]
            longest, num = max(longest, time.monotonic() - began), num + 1
            left = left_behind(family, process.pid)
            if process.returncode or left or "Traceback" in log:
                wrong.append((number.name, round(after_s, 2), process.returncode, left))
            after_s += 0.15
    verdict = f"  broken {wrong}" if wrong else ""
    name = " ".join(("while starting", *flags))
    print(f"{name:<34} {num} moments, the longest end {longest:.1f} s{verdict}", flush=True)
    return not wrong


def main() -> int:
    """Run the attacks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ATTACK")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args()
    known = attacks()
    if args.list:
        print(*known, "start", "start-of-two", sep="\n")
        return 0
    starts = {"start": (), "start-of-two": ("--api-server-count", "2")}
    chosen = args.names or [*known, *starts]
    with victim((), (), {}) as one:
        right = [text_of(one.served.url, prompt) for prompt in PROMPTS]
        one.served.process.terminate()
        one.served.process.wait(60)
    print(ROW)
    held = [
        start_signals(starts[name]) if name in starts else run(name, known[name], right)
        for name in chosen
    ]
    print(f"{sum(held)} of {len(held)} held")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
