"""Model folders that lie: each value of each key, each kind of file.

`python -m benchmarks.hostile_models [FAMILY ...]` spoils a tiny checkpoint in one place at a time
and generates four tokens in a child process with 3 GiB of address space more than it has. Each case
must end in ten seconds, with tokens or with one error of Quire's own; the others are printed, and
the exit code is then 1. Some minutes for each family on two cores.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.errors import EngineError
from quire.testing import make_checkpoint
from quire.testing.model_shapes import FAMILIES

LIMIT_S = 10.0
MORE_BYTES = 3 << 30
VALUES = [
    *(None, True, False, 0, -1, 1, 3, 7, 1000, 10**6, 10**9, 10**12, 2**31, 2**63, 2**64, 10**400),
    *(1.5, 0.0, -0.5, 1e30, 1e308, 1e-30, float("nan"), float("inf")),
    *("", "x", "128", "\0", "١٢٨", [], [1], [None], ["x"], [[]], {}, {"a": 1}),
]
KEYS = {
    "config.json": (
        *("rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "torch_dtype", "dtype"),
        *("model_max_length", "layer_types", "auto_map", "tokenizer_class", "sliding_window"),
        *("partial_rotary_factor", "quantization_config", "id2label"),
    ),
    "tokenizer_config.json": (
        *("eos_token", "bos_token", "added_tokens_decoder", "additional_special_tokens"),
        *("extra_special_tokens", "truncation_side", "add_bos_token", "chat_template", "auto_map"),
    ),
    "generation_config.json": (
        *("eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        "max_new_tokens",
    ),
}
KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: path.write_bytes(b""),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 50),
    "depth": lambda path: path.write_text('{"a":' * 100_000),
    "lists": lambda path: path.write_text('{"a":[' + "[]," * 1_000_000 + "1]}"),
    "digits": lambda path: path.write_text('{"id2label": ' + "9" * 4000 + "}"),
    "half a character": lambda path: path.write_text('{"eos_token": "\\ud800"}'),
    "a number": lambda path: path.write_text("7"),
}
NAMES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("model.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json"),
)


def main() -> int:
    """Run the cases of the named families (default: llama), and of files."""
    families = sys.argv[1:] or ["llama"]
    if unknown := set(families) - set(FAMILIES):
        raise SystemExit(f"no such family: {', '.join(sorted(unknown))}")
    num_cases = num_bad = 0
    with tempfile.TemporaryDirectory() as place:
        for family in families:
            good = make_checkpoint(Path(place) / family, "tiny", family)
            folder = Path(place) / "spoilt"
            for case in (*spoilt_keys(good, folder), *spoilt_files(good, folder)):
                outcome = in_child(folder, case)
                num_cases += 1
                if not outcome.startswith(("tokens", "refused")):
                    num_bad += 1
                    print(f"{family}: {case[0]}: {outcome}", flush=True)
    print(f"{num_cases} cases, {num_bad} of them bad")
    return 1 if num_bad else 0


Case = tuple[str, Callable[[], object]]
"""A name, and what makes the spoilt folder."""


def spoilt_keys(good: Path, folder: Path) -> Iterator[Case]:
    """One value of one key at a time."""
    for name, more in KEYS.items():
        path = good / name
        content = json.loads(path.read_text()) if path.exists() else {}
        for key in dict.fromkeys([*content, *more]):
            for value in VALUES:
                make = partial(_write_json, {**content, key: value})
                yield f"{name} {key}={value!r:.40}", partial(write, good, folder, name, make)


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content))


def spoilt_files(good: Path, folder: Path) -> Iterator[Case]:
    """One file at a time."""
    for name in NAMES:
        for kind, make in KINDS.items():
            yield f"{name} is {kind}", partial(write, good, folder, name, make)


def write(good: Path, folder: Path, name: str, make: Callable[[Path], Any]) -> None:
    """A copy of the good folder with one file made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


def in_child(folder: Path, case: Case) -> str:
    """What comes of a case: tokens, a refusal, another error, or the end of a process."""
    case[1]()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, outcome_of(folder).encode(errors="replace")[:4096])
        os._exit(0)
    os.close(writing)
    is_done, _, _ = select.select([reading], [], [], LIMIT_S)
    text = os.read(reading, 4096).decode() if is_done else f"more than {LIMIT_S:g} s"
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return text or f"the process ended with status {status}"


def outcome_of(folder: Path) -> str:
    """Generate from the folder, within limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options: dict[str, Any] = {"max_model_len": -1, "kv_cache_memory_bytes": 8 << 20}
    params = SamplingParams(max_tokens=4, temperature=0.0)
    try:
        with LLM(str(folder), max_num_seqs=4, cpu_threads=1, **options) as llm:
            (answer,) = llm.generate(["hello world"], params, use_tqdm=False)
        return f"tokens: {answer.outputs[0].token_ids}"
    except EngineError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
