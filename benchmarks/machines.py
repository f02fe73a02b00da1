"""One engine over several machines, which are network namespaces with a bad link between them.

    python -m benchmarks.machines [--only WORD] [--streams 32]

Each row runs streams over HTTP while something happens to the link or to a machine. Every stream
must end with the very text of an undisturbed run, or, where nothing is restarted, with one clear
error, within the time that the row allows. Exits with 1 otherwise. It needs root.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.testing.checkpoints import make_checkpoint
from tests.clusters.namespaces import Network, can_make_machines

SMALL = ("--dtype", "float32", "--max-num-seqs", "16", "--num-gpu-blocks-override", "400",
         "--max-model-len", "256", "--cpu-threads", "1")  # fmt: skip
PROMPTS = ("def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = [")
NUM_TOKENS = 48
START_S = 300.0
KEY = "a key of these machines alone"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
SILENT_S = 10.0
"""A core that gives no sign of life for so long counts as dead."""


Connect = Callable[[float], socket.socket]
"""Makes a connection to a server, whose calls may take so many seconds."""


def at_file(path: str) -> Connect:
    """A server at a socket file, which is the same in every namespace."""

    def connect(timeout_s: float) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout_s)
        made.connect(path)
        return made

    return connect


class Connection(http.client.HTTPConnection):
    """HTTP through a connection that `connect` makes."""

    def __init__(self, connect: Connect, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._connect = connect

    def connect(self) -> None:
        self.sock = self._connect(float(self.timeout or 0))


class Stream:
    """A completion that is read in a thread: its text, or its error, and its longest pause."""

    def __init__(self, connect: Connect, number: int) -> None:
        self.text, self.error, self.longest_pause_s = "", "", 0.0
        self._connect, self._number = connect, number
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        body = {
            "model": "",
            "prompt": PROMPTS[self._number % len(PROMPTS)],
            "max_tokens": NUM_TOKENS,
            "temperature": 0.8,
            "seed": self._number,
            "ignore_eos": True,
            "stream": True,
        }
        connection = Connection(self._connect, 120.0)
        last = time.monotonic()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
            reply = connection.getresponse()
            if reply.status != 200:
                self.error = reply.read().decode()
                return
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                self.longest_pause_s, last = max(self.longest_pause_s, now - last), now
                if line.startswith(b"data: [DONE]"):
                    return
                data = json.loads(line[6:])
                if "error" in data:
                    self.error = data["error"]["message"]
                    return
                self.text += data["choices"][0]["text"]
            self.error = "the stream ended without its end"
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()


def is_ready(connect: Connect) -> bool:
    """Whether a server answers /ready with 200."""
    connection = Connection(connect, 5.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Service:
    """A front end with a core on machine 0, and headless cores on the others; with `sizes`, such as
    -tp 2, headless ranks of that core. On its own, the front end has one core.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        *flags: str,
        sizes: Sequence[str] = (),
        is_alone: bool = False,
    ) -> None:
        self.network = network
        self.path = str(folder / "http")
        self._folder = folder
        self._front, *self._others = network.machines
        self._size = len(network.machines)
        self._flags, self._sizes, self._is_alone = flags, sizes, is_alone
        self.front = self._serve(0, "--uds", self.path, "--shutdown-timeout", "1")
        others = range(1, 1 if is_alone else self._size)
        self.headless = {rank: self.join(rank) for rank in others}
        self.wait_until_ready()

    def join(self, rank: int) -> subprocess.Popen[bytes]:
        """Start the headless machine of a rank."""
        return self._serve(rank, "--headless")

    def _serve(self, rank: int, *words: str) -> subprocess.Popen[bytes]:
        machine, size, address = self.network.machines[rank], str(self._size), self._front.address
        command = [sys.executable, "-m", "quire", "serve", *words, *SMALL, *self._flags]
        if self._is_alone:
            pass
        elif self._sizes:
            command += [*self._sizes, "--nnodes", size, "--master-addr", address]
            command += ["--node-rank", str(rank)]
        else:
            command += ["--data-parallel-size", size, "--data-parallel-address", address]
            command += ["--data-parallel-size-local", "1"]
            command += ["--data-parallel-start-rank", str(rank)] if rank else []
        environ = os.environ | {"QUIRE_CLUSTER_SECRET": "a secret of these machines alone"}
        with open(self._folder / f"{machine.name}.log", "ab") as log:
            return subprocess.Popen(machine.command(*command), env=environ, stderr=log)

    def wait_until_ready(self) -> None:
        """Wait for /ready."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.front.poll() is None:
            if is_ready(at_file(self.path)):
                return
            time.sleep(0.2)
        raise TimeoutError((self._folder / f"{self._front.name}.log").read_text())

    def kill_machine(self, rank: int) -> None:
        """Lose the headless machine of a rank."""
        self.network.machines[rank].lose()
        self.headless[rank].wait()

    def streams(self, count: int) -> list[Stream]:
        """Begin so many streams."""
        return [Stream(at_file(self.path), number) for number in range(count)]

    def close(self) -> None:
        """End the front end, which ends the others."""
        for machine in self.network.machines:
            machine.link.is_cut = False
        for process in (self.front, *self.headless.values()):
            process.send_signal(signal.SIGTERM)
        for process in (self.front, *self.headless.values()):
            process.wait(60)


def wait(streams: list[Stream]) -> None:
    """Wait for the ends of streams."""
    for stream in streams:
        stream.thread.join()


def report(name: str, streams: list[Stream], expected: list[str], most_s: float) -> bool:
    """Print a row; whether it is as it should be."""
    wrong = sum(s.text != text for s, text in zip(streams, expected, strict=True) if not s.error)
    errors = sorted({s.error for s in streams if s.error})
    pause_s = max(s.longest_pause_s for s in streams)
    num_right = sum(not s.error for s in streams) - wrong
    print(f"| {name} | {num_right} of {len(streams)} | {'; '.join(errors)} | {pause_s:.1f} |")
    sys.stdout.flush()
    return not wrong and len(errors) <= 1 and pause_s <= most_s


@contextmanager
def service(
    network: Network, *flags: str, sizes: Sequence[str] = (), is_alone: bool = False
) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        found = Service(network, Path(folder), *flags, sizes=sizes, is_alone=is_alone)
        try:
            yield found
        finally:
            found.close()


def with_restarts(network: Network, count: int, only: str) -> bool:
    """The rows whose streams all end with their text."""
    is_good = True
    last = network.machines[-1]
    number = len(network.machines) - 1
    with service(network) as cores:
        undisturbed = cores.streams(count)
        wait(undisturbed)
        expected = [stream.text for stream in undisturbed]
        is_good &= report("undisturbed", undisturbed, expected, START_S)

        def bad_link() -> None:
            last.link.loss, last.link.delay_s, last.link.jitter_s = 0.05, 0.02, 0.03

        def cut_for_a_while() -> None:
            last.link.is_cut = True
            time.sleep(SILENT_S / 2)
            last.link.is_cut = False

        def machine_comes_back() -> None:
            cores.kill_machine(number)
            last.link.is_cut = False
            cores.headless[number] = cores.join(number)

        rows: dict[str, tuple[Callable[[], None], float]] = {
            "loss 5 %, 20 to 50 ms, reordered": (bad_link, SILENT_S),
            "link cut for 5 s": (cut_for_a_while, SILENT_S),
            "a machine is lost, and comes back": (machine_comes_back, START_S),
        }
        for name, (disturb, most_s) in rows.items():
            if only not in name:
                continue
            streams = cores.streams(count)
            time.sleep(0.5)
            disturb()
            wait(streams)
            is_good &= report(name, streams, expected, most_s)
            last.link.loss = last.link.delay_s = last.link.jitter_s = 0.0
    return is_good


def with_shared_model(
    network: Network, count: int, name: str, sizes: Sequence[str], *flags: str
) -> bool:
    """One model on all machines, by the workers of a core or cores that share experts: the texts of
    one core, also over a bad link, and when a machine is lost and comes back.
    """
    last, number = network.machines[-1], len(network.machines) - 1
    with service(network, *flags, is_alone=True) as alone:
        streams = alone.streams(count)
        wait(streams)
        expected = [stream.text for stream in streams]
    with service(network, *flags, sizes=sizes) as cores:
        streams = cores.streams(count)
        wait(streams)
        is_good = report(name, streams, expected, START_S)
        last.link.loss, last.link.delay_s, last.link.jitter_s = 0.01, 0.001, 0.002
        streams = cores.streams(count)
        wait(streams)
        is_good &= report(f"{name}, loss 1 %, 1 to 3 ms", streams, expected, START_S)
        last.link.loss = last.link.delay_s = last.link.jitter_s = 0.0
        streams = cores.streams(count)
        time.sleep(0.3)
        cores.kill_machine(number)
        last.link.is_cut = False
        cores.headless[number] = cores.join(number)
        wait(streams)
        return is_good & report(f"{name}, a machine comes back", streams, expected, START_S)


def with_experts(network: Network, count: int) -> bool:
    """Experts that are spread over the machines; and a machine that is lost for good."""
    size = str(len(network.machines))
    sizes = ("--data-parallel-size", size, "--enable-expert-parallel")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, "tiny", family="qwen3_moe", dtype="float32")
        name, model = f"experts over {size}", ("--model", folder)
        is_good = with_shared_model(network, count, name, sizes, *model)
        with service(network, *model, "--max-core-restarts", "0", sizes=sizes) as cores:
            streams = cores.streams(count)
            time.sleep(0.3)
            cores.kill_machine(len(network.machines) - 1)
            wait(streams)
            expected = [stream.text for stream in streams]
            name += ", a machine is lost for good"
            return is_good & report(name, streams, expected, 2 * SILENT_S)


def ask(connect: Connect, path: str, body: object = None) -> Any:
    """The reply to a POST, or without a body to a GET."""
    connection = Connection(connect, START_S)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if sent is None else "POST", path, sent, HEADERS)
        reply = connection.getresponse()
        text = reply.read().decode()
        assert reply.status == 200, text
        return json.loads(text)
    finally:
        connection.close()


def with_scaling(network: Network, count: int) -> bool:
    """More cores, and fewer, the headless one among them, while streams run."""
    with service(network, "--enable-admin", "--api-key", KEY) as cores:
        connect, size = at_file(cores.path), len(network.machines)
        undisturbed = cores.streams(count)
        wait(undisturbed)
        expected = [stream.text for stream in undisturbed]
        is_good = True
        for new_size in (size + 1, 1):
            streams = cores.streams(count)
            time.sleep(0.3)
            began = time.monotonic()
            ask(connect, "/scale_elastic_ep", {"new_data_parallel_size": new_size})
            took_s = time.monotonic() - began
            wait(streams)
            after = cores.streams(count)
            wait(after)
            plan = ask(connect, "/server_info")["plan"]
            is_good &= plan["data_parallel_size"]["value"] == new_size
            name = f"scaled to {new_size} cores in {took_s:.1f} s"
            is_good &= report(name, streams + after, expected * 2, START_S)
        codes = [process.wait(60) for process in cores.headless.values()]
        print(f"The headless machines have ended with {codes}.")
        return is_good and set(codes) == {0}


def without_restarts(network: Network, count: int) -> bool:
    """A machine is lost for good where nothing may be restarted: one error, soon."""
    with service(network, "--max-core-restarts", "0") as cores:
        streams = cores.streams(count)
        time.sleep(0.5)
        cores.kill_machine(len(network.machines) - 1)
        began = time.monotonic()
        wait(streams)
        took_s = time.monotonic() - began
        expected = [stream.text for stream in streams]
        is_good = report("a machine is lost for good", streams, expected, 2 * SILENT_S)
        print(
            f"The last stream ended after {took_s:.1f} s; the server with {cores.front.wait(60)}."
        )
        return is_good and took_s < 2 * SILENT_S


def front_end_lost(network: Network) -> bool:
    """The front end's machine is lost without a word: headless cores end by themselves."""
    with service(network) as cores:
        network.machines[0].link.is_cut = True
        cores.front.kill()
        began = time.monotonic()
        code = cores.headless[1].wait(60)
        took_s = time.monotonic() - began
        print(f"| the front end is lost | headless ends with {code} | | {took_s:.1f} |")
        return code == 3 and took_s < 1.5 * SILENT_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--machines", type=int, default=2)
    args = parser.parse_args()
    if why := can_make_machines():
        print(f"No machines here: {why}.")
        return 2
    network = Network(args.machines)
    print(
        "| row | streams with their text | errors | longest pause (s) |\n| --- | --- | --- | --- |"
    )
    is_good = True
    try:
        if any(args.only in name for name in ("loss", "link", "comes back", "undisturbed")):
            is_good &= with_restarts(network, args.streams, args.only)
        if args.only in "a machine is lost for good":
            is_good &= without_restarts(network, args.streams)
        if args.only in "the front end is lost":
            is_good &= front_end_lost(network)
        for option in ("-tp", "-pp"):
            sizes, name = (option, str(args.machines)), f"ranks: {option} {args.machines}"
            if args.only in name:
                is_good &= with_shared_model(network, args.streams, name, sizes)
        if args.only in "scaled":
            is_good &= with_scaling(network, args.streams)
        if args.only in "experts":
            is_good &= with_experts(network, args.streams)
    finally:
        network.close()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
