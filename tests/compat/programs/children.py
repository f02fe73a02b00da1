"""Starts interpreters that import vllm, in each of the usual ways."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version

import vllm


def name_of(thing: str) -> str:
    return f"{getattr(vllm, thing).__module__} {version('vllm')}"


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        print(pool.submit(name_of, "SamplingParams").result())
    code = "import vllm; print(vllm.SamplingParams.__module__, vllm.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True)
    print(sys.argv[1:], __name__)
    sys.exit(7)
