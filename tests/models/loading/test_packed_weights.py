"""Packed weights of earlier starts: the same bits, for what they were made from alone."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from quire.executor import packed_file
from quire.executor.packed_file import preparation
from quire.hardware.native import find_native
from quire.hardware.prepared_memory import Preparation, prepare
from quire.models.loading import packed_weights
from quire.models.loading.ahead.headers import fetch_small_tensors, placed_tensors
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, plan_of, same_bits, serve
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, write

pytestmark = pytest.mark.skipif(
    find_native()[0] is None or sys.platform != "linux", reason="packs natively"
)
KINDS = ("gptq", "awq", "bnb_nf4", "fp8")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of packed weights, for models of any size."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A dense model whose head is its table, with biases."""
    shape = {"num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": True}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen2", dtype="bfloat16")


@pytest.fixture
def own(tiny, tmp_path):
    """The same, of which files may be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "own"))


def answers(folder, **args):
    core = open_core(folder, 1, **args)
    found = serve(core)
    core.shutdown()
    return found


def mapped(folder):
    """How many mappings of files in `folder` this process has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def packing(monkeypatch):
    """The names of weights that are packed from now on."""
    names = []
    note = packed_weights.PackedWeights.note
    monkeypatch.setattr(
        packed_weights.PackedWeights,
        "note",
        lambda self, name, weight: (names.append(name), note(self, name, weight)),
    )
    return names


@pytest.mark.parametrize(
    "args",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"},
     {"dtype": "float16"}, {"enforce_eager": True}],
    ids=str,
)  # fmt: skip
def test_a_second_start_maps_what_the_first_has_packed(tiny, cache, monkeypatch, args):
    right = answers(tiny, packed_weights_gib=0, **args)
    assert not cache.exists()
    assert same_bits(answers(tiny, **args), right)
    assert len(list(cache.iterdir())) == 1
    names = packing(monkeypatch)
    core = open_core(tiny, 1, **args)
    assert mapped(cache) == 1 and not names
    assert same_bits(serve(core), right)
    core.shutdown()
    del core
    assert not mapped(cache)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_experts_too(tmp_path, cache, monkeypatch, quantization):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    folder = make_checkpoint(tmp_path / "experts", shape, "qwen3_moe", dtype="bfloat16")
    right = answers(folder, quantization=quantization)
    names = packing(monkeypatch)
    assert same_bits(answers(folder, quantization=quantization), right)
    assert not names and len(list(cache.iterdir())) == 1
    core = open_core(folder, 1, quantization=quantization, enable_lora=True, max_lora_rank=8)
    assert same_bits(serve(core), right)
    core.shutdown()


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind in FORMATS | BYTE_FORMATS])
def test_weights_in_codes_too(tmp_path, cache, monkeypatch, name):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    plain = make_checkpoint(tmp_path / "plain", shape, "qwen3", dtype="float32")
    write(plain, tmp_path / "coded", (FORMATS | BYTE_FORMATS)[name])
    right = answers(tmp_path / "coded")
    names = packing(monkeypatch)
    assert same_bits(answers(tmp_path / "coded"), right)
    assert not names and len(list(cache.iterdir())) == 1


def test_whatever_weights_are_made_from_is_in_the_name(own, cache, monkeypatch):
    names = packing(monkeypatch)

    def is_packed(**args):
        names.clear()
        answers(own, **args)
        return bool(names)

    assert is_packed() and not is_packed()
    assert is_packed(quantization="int8")
    assert is_packed(dtype="float16")
    monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    assert is_packed()
    monkeypatch.delenv("QUIRE_CPU_ISA")
    weights = own / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert is_packed(), "a file of another time"
    data = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    assert is_packed(), "another file"
    monkeypatch.setattr(packed_file, "_code_version", lambda: "another")
    assert is_packed()
    assert not is_packed()


def test_other_weights_give_other_answers(own, cache):
    first = answers(own)
    shape = {"num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": True}
    make_checkpoint(own, shape, "qwen2", seed=1, dtype="bfloat16")
    second = answers(own)
    assert not same_bits(first, second)
    assert same_bits(answers(own), second)


def test_reloading_reads_the_checkpoint_as_it_is_now(own, cache):
    first = answers(own)
    core = open_core(own, 1)
    assert mapped(cache) == 1
    for seed, reload in enumerate(("reload_weights", "sleep"), 1):
        shape = {"num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": True}
        make_checkpoint(own, shape, "qwen2", seed=seed, dtype="bfloat16")
        if reload == "sleep":
            core.sleep(2)
            core.wake_up()
        else:
            core.collective_rpc(reload)
        core.reset_prefix_cache()
        right = answers(own, packed_weights_gib=0)
        assert not same_bits(right, first)
        assert same_bits(serve(core), right), reload
    core.shutdown()
    assert same_bits(answers(own), right), "of the file that reloading has left"


def test_weights_of_files_that_change_while_they_are_read_are_not_kept(own, cache, monkeypatch):
    note = packed_weights.PackedWeights.note

    def change(self, name, weight):
        os.utime(own / "model.safetensors", ns=(1, 1))
        note(self, name, weight)

    monkeypatch.setattr(packed_weights.PackedWeights, "note", change)
    answers(own)
    assert not cache.exists()


def test_a_program_that_does_not_close_its_engine_leaves_a_file(tiny, cache):
    program = (
        "import sys; from quire import LLM\n"
        "from quire.models.loading import packed_weights as module\n"
        "module.LEAST_BYTES = 1\n"
        "slow = module.write_buffers\n"
        "def write(*args):\n"
        "    import threading; threading.main_thread().join(); return slow(*args)\n"
        "module.write_buffers = write\n"
        "llm = LLM(sys.argv[1], max_model_len=64, skip_tokenizer_init=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "not one", "a folder", "in the head", "a pipe"])
def test_a_file_that_cannot_be_used_is_made_again(tiny, cache, caplog, damage):
    right = answers(tiny)
    (file,) = cache.iterdir()
    if damage == "cut":
        os.truncate(file, 10_000)
    elif damage == "in the head":
        data = file.read_bytes()
        assert data.count(b"out_features") > 1
        file.write_bytes(data.replace(b"out_features", b"put_features", 1))
    elif damage == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif damage == "not one":
        file.write_bytes(b"nothing")
    else:
        file.unlink()
        file.mkdir()
    with caplog.at_level("WARNING", logger="quire"):
        assert same_bits(answers(tiny), right)
    assert "are not used" in caplog.text
    if damage != "a folder":
        assert [each.name for each in cache.iterdir()] == [file.name]
        assert file.stat().st_size > 10_000


def test_a_folder_that_cannot_be_written_costs_nothing(tiny, cache):
    right = answers(tiny, packed_weights_gib=0)
    cache.parent.mkdir()
    cache.write_text("a file")
    assert same_bits(answers(tiny), right)


def test_files_make_room_in_the_order_of_their_use(tiny, cache):
    answers(tiny)
    (first,) = cache.iterdir()
    answers(tiny, quantization="int8")
    (second,) = set(cache.iterdir()) - {first}
    os.utime(second, (1, 1))
    answers(tiny)  # the first is used
    gib = 1.6 * first.stat().st_size / 2**30
    answers(tiny, dtype="float16", packed_weights_gib=gib)
    left = set(cache.iterdir())
    assert first in left and second not in left
    answers(tiny, dtype="float32", packed_weights_gib=first.stat().st_size / 2**31)
    assert set(cache.iterdir()) == left, "larger than all that may be kept"


def test_adapters_and_sleep_with_mapped_weights(tiny, cache, monkeypatch):
    args = {"enable_lora": True, "max_lora_rank": 8}
    right = answers(tiny, **args)
    names = packing(monkeypatch)
    core = open_core(tiny, 1, **args)
    assert same_bits(serve(core), right)
    core.sleep(2)
    assert not mapped(cache)
    core.wake_up()
    assert same_bits(serve(core), right)
    assert not names
    core.shutdown()


def test_no_thread_is_left(tiny):
    answers(tiny)
    assert "packed-weights" not in {thread.name for thread in threading.enumerate()}


def test_random_weights_and_small_models_have_no_file(tiny, cache, monkeypatch):
    answers(tiny, load_format="dummy")
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 64 << 20)
    answers(tiny)
    assert not cache.exists()


def test_a_start_from_the_file_reads_small_leaves_alone(tiny, monkeypatch):
    """The checkpoint's other pages may have left memory, and nobody needs them."""
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *of: asked.append(of[1:3]))
    answers(tiny)
    assert not asked, "the loader is about to read all"
    answers(tiny)
    small = [t for t in placed_tensors(tiny).values() if t.num_bytes <= 64 << 10]
    assert "model.norm.weight" in {t.name for t in small}
    assert asked == [(t.at, t.num_bytes) for t in small]


@pytest.mark.parametrize("offsets", [[-8, 0], [1 << 62, 1 << 62], [8, 0], [0, 1 << 70]])
def test_small_leaves_at_places_that_make_no_sense_are_left_to_the_loader(tmp_path, offsets):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    fetch_small_tensors(tmp_path)


def test_weights_are_packed_into_memory_that_was_prepared(tmp_path):
    """As many bytes as the plan expects are enough, unless a file has the weights."""
    shape = {"num_hidden_layers": 2, "vocab_size": 9000, "hidden_size": 256}
    folder = make_checkpoint(tmp_path / "model", shape, "qwen2", dtype="bfloat16")
    plan = plan_of(folder, quantization="int8")
    before = Preparation(num_bytes=plan.model.weight_bytes)
    assert preparation(plan.model, plan.parallel) == before
    right = answers(folder, quantization="int8", packed_weights_gib=0)
    prepare(before)
    assert same_bits(answers(folder, quantization="int8"), right)
    [file] = (tmp_path / "cache" / "packed").iterdir()
    assert preparation(plan.model, plan.parallel) == Preparation(file=str(file)), "which has them"
    for changed in ({"load_format": "dummy"}, {"model_impl": "transformers"}):
        other = msgspec.structs.replace(plan.model, **changed)
        assert preparation(other, plan.parallel) == Preparation()
