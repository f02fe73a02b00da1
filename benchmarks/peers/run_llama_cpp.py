"""llama.cpp through the C interface of llama-cpp-python, prompts in one batch, greedy; kinds are
bf16, q8_0, q4_0 (weights).

The weights are converted once, with the `gguf` package, into the cache folder.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from gguf_weights import write_gguf
from protocol import Generate, serve

_FILE_TYPES = {"q8_0": 7, "q4_0": 2}  # enum llama_ftype
_BATCH = 2048
_MICRO_BATCH = 512


def open_engine(request: dict[str, Any]) -> Generate:
    """A context for all prompts at once, on all threads."""
    api.llama_backend_init()
    file = find_weights(Path(request["model"]), Path(request["cache"]), request)
    options = api.llama_model_default_params()
    model = api.llama_model_load_from_file(str(file).encode(), options)
    assert model, f"llama.cpp cannot load {file}"
    return Runner(model, request).generate


def find_weights(folder: Path, cache: Path, request: dict[str, Any]) -> Path:
    """The GGUF file of a kind, made at the first use."""
    cache.mkdir(parents=True, exist_ok=True)
    plain = cache / f"{folder.name}.bf16.gguf"
    if not plain.exists():
        write_gguf(folder, plain)
    kind = request["kind"]
    if kind == "bf16":
        return plain
    file = cache / f"{folder.name}.{kind}.gguf"
    if not file.exists():
        options = api.llama_model_quantize_default_params()
        options.ftype = _FILE_TYPES[kind]
        options.nthread = request["num_threads"]
        failed = api.llama_model_quantize(
            str(plain).encode(), str(file).encode(), ctypes.byref(options)
        )
        assert not failed, f"llama.cpp cannot quantize {plain}"
    return file


class Runner:
    """A model and, for each shape of request, a context of fitting size."""

    def __init__(self, model: Any, request: dict[str, Any]) -> None:
        self.model = model
        self.num_threads = request["num_threads"]
        self.num_tokens = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.batch = api.llama_batch_init(_BATCH, 0, 1)
        self.context: Any = None
        self.size = (0, 0)

    def generate(self, prompts: list[list[int]], length: int) -> tuple[list[list[int]], float]:
        """See protocol.Generate."""
        self._open(len(prompts), len(prompts[0]) + length)
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        outputs = [[token] for token in self._prefill(prompts)]
        start = time.perf_counter()
        for step in range(length - 1):
            position = len(prompts[0]) + step
            new = [(ids[-1], position, row, True) for row, ids in enumerate(outputs)]
            for ids, token in zip(outputs, self._decode(new), strict=True):
                ids.append(token)
        return outputs, time.perf_counter() - start

    def _open(self, rows: int, tokens: int) -> None:
        """Make room for so many requests of so many tokens; nothing if there is."""
        if self.context and rows <= self.size[0] and tokens <= self.size[1]:
            return
        if self.context:
            api.llama_free(self.context)
        self.size = (rows, -(-tokens // 256) * 256)
        options = api.llama_context_default_params()
        options.n_ctx = self.size[0] * self.size[1]
        options.n_seq_max = rows
        options.n_batch = _BATCH
        options.n_ubatch = _MICRO_BATCH
        options.n_threads = options.n_threads_batch = self.num_threads
        options.no_perf = True
        self.context = api.llama_init_from_model(self.model, options)
        assert self.context, "llama.cpp has no room for the context"

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each prompt."""
        last = len(prompts[0]) - 1
        entries = [
            (token, position, row, position == last)
            for row, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        starts = range(0, len(entries), _BATCH)
        return [token for at in starts for token in self._decode(entries[at : at + _BATCH])]

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, request, is wanted); the likeliest tokens after the wanted ones."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, is_wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = is_wanted
        assert api.llama_decode(self.context, batch) == 0, "llama_decode failed"
        return [self._likeliest(i) for i, entry in enumerate(entries) if entry[3]]

    def _likeliest(self, index: int) -> int:
        row = api.llama_get_logits_ith(self.context, index)
        return int(np.argmax(np.ctypeslib.as_array(row, (self.num_tokens,))))


if __name__ == "__main__":
    serve(open_engine)
