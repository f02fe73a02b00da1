"""`quire serve` as a process of its own, as an operator starts it."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import psutil

SMALL = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "64M", "--dtype", "float32")
ENCODER = ("--dtype", "float32")
"""Instead of SMALL for a model without keys and values."""
START_S = 120


class Served:
    """A running server: where it is, and its process."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        self._clients = []
        self._news = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.line_with(r"Serving .* at (\S+)").group(1)

    def _read(self):
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def line_with(self, pattern):
        def found():
            return re.search(pattern, self.log) or self._is_over

        with self._news:
            self._news.wait_for(found, START_S)
            match = re.search(pattern, self.log)
        assert match, self.log
        return match

    @property
    def log(self):
        return "".join(self.lines)

    def client(self, **options):
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def post(self, path, body, **options):
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path, **options):
        with self.client() as client:
            return client.get(path, **options)

    def metric(self, name, **options):
        lines = self.get("/metrics", **options).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def core(self):
        children = psutil.Process(self.process.pid).children(recursive=True)
        [found] = [each for each in children if each.name() == "EngineCore"]
        return found

    def openai(self, api_key="none"):
        from openai import OpenAI

        made = OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)
        self._clients.append(made)
        return made

    def close_clients(self):
        for client in self._clients:
            client.close()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        code = self.process.wait(60)
        self._reader.join(10)
        return code


def command_of(*flags, interpreter=(), basis=SMALL):
    """How a server is started; `interpreter`: flags of Python itself; `basis`: SMALL or ENCODER."""
    module = ["-m", "quire.cli.main", "serve", "--port", "0"]
    return [sys.executable, *interpreter, *module, *basis, *flags]


def start(*flags, environ=None, interpreter=(), limit=None, basis=SMALL):
    """Start a server and wait until it answers; `limit`: what `ulimit -n` allows."""
    command = command_of(*flags, interpreter=interpreter, basis=basis)
    if limit is not None:
        command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command]
    variables = {**os.environ, **(environ or {})}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=variables
    )
    try:
        return Served(process)
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextmanager
def serving(*flags, **options):
    """A server for a block; it must end well. `options` are those of `start`."""
    running = start(*flags, **options)
    try:
        yield running
    finally:
        running.close_clients()
        if running.process.poll() is None:
            code = running.stop()
            assert code == 0, running.log
        running.process.stderr.close()
