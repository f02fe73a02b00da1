"""llama.cpp's library of pictures, mtmd, through the C interface of llama-cpp-python, for
picture_encoder.py: it asks in a JSON file and gets another one.

A batch is its pictures one after the other: the library's graph for LLaVA has room for one.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from gguf_pictures import write_files
from llama_cpp import mtmd_cpp as mtmd


class Pictures:
    """A tower and a decoder, each with a context."""

    def __init__(self, folder: Path, kind: str, num_threads: int) -> None:
        tower, decoder = write_files(folder, kind)
        api.llama_backend_init()
        model = api.llama_model_load_from_file(
            str(decoder).encode(), api.llama_model_default_params()
        )
        assert model, f"llama.cpp cannot load {decoder}"
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 1024
        options.n_threads = options.n_threads_batch = num_threads
        self.context = api.llama_init_from_model(model, options)
        self.num_tokens = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.width = api.llama_model_n_embd(model)
        settings = mtmd.mtmd_context_params_default()
        settings.use_gpu = settings.print_timings = settings.warmup = False
        settings.n_threads = num_threads
        self.tower = mtmd.mtmd_init_from_file(str(tower).encode(), model, settings)
        assert self.tower, f"llama.cpp cannot load {tower}"
        self.batch = api.llama_batch_init(8, 0, 1)

    def chunks(self, bitmap: Any) -> Any:
        """The prompt that is a picture alone."""
        marker = mtmd.mtmd_default_marker()
        text = mtmd.mtmd_input_text(marker, len(marker), False, False)
        found = mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        failed = mtmd.mtmd_tokenize(self.tower, found, ctypes.byref(text), bitmaps, 1)
        assert not failed and mtmd.mtmd_input_chunks_size(found) == 1, "one picture"
        return found

    def encode(self, chunks: Any) -> None:
        """Compute the rows of a picture."""
        failed = mtmd.mtmd_encode_chunk(self.tower, mtmd.mtmd_input_chunks_get(chunks, 0))
        assert not failed, "mtmd cannot encode"

    def rows(self, chunks: Any) -> np.ndarray:
        """Its rows [n, C]."""
        self.encode(chunks)
        count = mtmd.mtmd_input_chunk_get_n_tokens(mtmd.mtmd_input_chunks_get(chunks, 0))
        values = ctypes.cast(mtmd.mtmd_get_output_embd(self.tower), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(values, (count, self.width)).copy()

    def first_token(self, file: bytes, before: int, after: int) -> int:
        """The likeliest token after a token, the picture in a file, and a token."""
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        data = (ctypes.c_uint8 * len(file)).from_buffer_copy(file)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self.tower, data, len(file), False)
        assert bitmap, "mtmd cannot decode the file"
        chunks = self.chunks(bitmap)
        self._decode(before, 0)
        end = api.llama_pos(0)
        failed = mtmd.mtmd_helper_eval_chunks(
            self.tower, self.context, chunks, 1, 0, 1024, False, ctypes.byref(end)
        )
        assert not failed, "mtmd cannot run the prompt"
        self._decode(after, end.value)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        row = api.llama_get_logits_ith(self.context, 0)
        return int(np.argmax(np.ctypeslib.as_array(row, (self.num_tokens,))))

    def _decode(self, token: int, position: int) -> None:
        batch = self.batch
        batch.n_tokens = 1
        batch.token[0], batch.pos[0] = token, position
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, True
        assert api.llama_decode(self.context, batch) == 0, "llama_decode failed"


def main() -> None:
    """Answer the request in argv[1]."""
    request = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(request["folder"])
    pictures = Pictures(folder, request["kind"], request["num_threads"])
    pixels = np.load(folder / "pixels.npy")  # uint8 [height, width, 3]
    flat = np.ascontiguousarray(pixels)
    bitmap = mtmd.mtmd_bitmap_init(
        flat.shape[1], flat.shape[0], flat.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    )
    chunks = pictures.chunks(bitmap)
    np.save(folder / "rows.npy", pictures.rows(chunks))
    calls = request["calls"]
    answer: dict[str, Any] = {"seconds": {}}
    for batch in request["batches"]:
        answer["seconds"][batch] = _median(
            lambda count=batch: [pictures.encode(chunks) for _ in range(count)], calls
        )
    files = iter(sorted(folder.glob("*.jpeg")))
    ids = []
    answer["first_token_s"] = _median(
        lambda: ids.append(pictures.first_token(next(files).read_bytes(), *request["around"])),
        calls,
    )
    answer["first_tokens"] = ids
    Path(request["answer"]).write_text(json.dumps(answer))


def _median(call: Callable[[], object], count: int) -> float:
    """Seconds, after one call that nobody times."""
    call()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


if __name__ == "__main__":
    main()
