"""Weights in mapped files: the same bits, within less memory than they take."""

import errno
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import LoadError
from quire.hardware import weight_file
from quire.hardware.disk import free_disk_bytes
from quire.hardware.native import find_native
from quire.testing import make_checkpoint
from quire.testing.model_shapes import make_config
from tests.executor.worker_cores import open_core, same_bits, serve


def mapped_files(folder):
    """The files in `folder` without a name that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line and line.endswith("(deleted)")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_mapped_weights_give_the_same_bits(tiny, tmp_path, monkeypatch, caplog, quantization):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(weight_file, "LEAST_BYTES", 0)
    in_memory = open_core(tiny, 1, quantization=quantization)
    right = serve(in_memory)
    in_memory.shutdown()
    assert not mapped_files(tmp_path)
    with caplog.at_level("WARNING", logger="quire"):
        mapped = open_core(tiny, 1, quantization=quantization, load_format="mmap")
    assert f"mapped files in {tmp_path}/weights" in caplog.text
    assert len(mapped_files(tmp_path)) > 8
    assert not list((tmp_path / "weights").iterdir()), "the files have no names"
    assert same_bits(serve(mapped), right)
    mapped.shutdown()
    del mapped
    gc.collect()
    assert not mapped_files(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LoadError, match=r"2\.00 GiB .* No space left .* QUIRE_CACHE_DIR"):
        weight_file.file_pages(tmp_path, 2 << 30)
    with pytest.raises(LoadError, match="No file of"):
        weight_file.file_pages(Path("/proc/nowhere"), 1 << 20)


def test_a_file_system_in_memory_is_not_a_disk(tmp_path):
    point = str(tmp_path / "in memory").replace(" ", "\\040")
    disk = "20 1 8:1 / / rw - ext4 /dev/sda rw\n"

    def read(path):
        return f"{disk}21 20 0:9 / {point} rw - tmpfs tmpfs rw\n"

    assert free_disk_bytes(read, tmp_path / "in memory" / "weights") > 0, "not made yet"
    (tmp_path / "in memory").mkdir()
    assert free_disk_bytes(read, tmp_path / "in memory" / "weights") == 0
    assert free_disk_bytes(read, tmp_path / "weights") > 0
    assert free_disk_bytes(lambda path: "", tmp_path) > 0
    assert free_disk_bytes(read, tmp_path / ("x" * 300) / "weights") == 0, "a name that is too long"


RUN = """
import sys
from quire import LLM, SamplingParams
with LLM(sys.argv[1], skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
         cpu_threads=2, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64) as llm:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    print(list(llm.generate({"prompt_token_ids": [1, 2, 3]}, params)[0].outputs[0].token_ids))
"""


@pytest.mark.full
@pytest.mark.skipif(find_native()[0] is None or sys.platform != "linux", reason="packs natively")
def test_a_model_of_twice_the_memory_generates(tmp_path):
    """1.8 GiB of weights within 0.86 GiB of private memory; files do not count for ulimit -d."""
    shape = {
        "num_hidden_layers": 60, "hidden_size": 1024, "intermediate_size": 4096,
        "vocab_size": 4000, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(make_config(shape, "qwen3")))

    def answer(limit):
        done = subprocess.run(
            ["bash", "-c", f'{limit} exec "$0" "$@"', sys.executable, "-c", RUN, str(tmp_path)],
            env={**os.environ, "QUIRE_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return re.search(r"\[\d.*\]", done.stdout)[0], done.stderr

    ids, log = answer("")
    assert "mapped files" not in log
    limited, log = answer("ulimit -d 900000;")
    assert limited == ids
    assert "Weights are kept in mapped files" in log
