"""`python -m quire.as_vllm PROGRAM ARGS...`: run a program that imports vllm.

PROGRAM is a file, the name of an installed command that is a Python script, `vllm`, `-m MODULE` or
`-c CODE`, as with the interpreter itself.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType

from quire.as_vllm.table import COMMAND, ROOT
from quire.as_vllm.variables import name_for_children

_USAGE = "usage: python -m quire.as_vllm {PROGRAM | -m MODULE | -c CODE} [ARGS...]"


def main(words: list[str]) -> None:
    """Run what `words` say as the main program; its exceptions and exit codes are its own."""
    if not words or words[0] in ("-h", "--help") or (words[0] in ("-m", "-c") and not words[1:]):
        raise SystemExit(f"{_USAGE}\n\n{__doc__}")
    name_for_children()
    # `vllm serve ...` means the command, unless a program of that name lies here
    if words[0] == ROOT and not os.path.isfile(ROOT):
        words = ["-m", COMMAND, *words[1:]]
    if words[0] == "-m":
        sys.argv = words[1:]  # the module puts its path at the head
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), program.__dict__)
    else:
        path = _program(words[0])
        sys.argv = [path, *words[1:]]
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(path).resolve().parent)
        runpy.run_path(path, run_name="__main__")


def _program(name: str) -> str:
    """The file that `name` stands for: itself, or a command found on the PATH."""
    path = name if os.path.exists(name) else shutil.which(name)
    if path is None:
        raise SystemExit(f"quire.as_vllm: there is no program {name!r}\n{_USAGE}")
    if os.path.isfile(path):
        with open(path, "rb") as file:
            first = file.readline(256)
        if first.startswith((b"#!", b"\x7fELF")) and b"python" not in first:
            raise SystemExit(f"quire.as_vllm: {path} is not a Python program")
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
