"""The root of K/V that leaves the process: whatever may change a bit changes it."""

import sys
from dataclasses import replace
from types import ModuleType

import msgspec
import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import worker_config
from quire.executor.kv_tier import root as tier_root
from quire.executor.kv_tier.root import model_files, root_parts
from quire.executor.platform import open_platform
from quire.models import read_spec
from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.plugins import EntryPoint, PluginRecord
from quire.testing import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "llama"
    return make_checkpoint(path, {"num_hidden_layers": 1}, "llama")


def parts_of(folder, changed=lambda config: config, place=None, **options):
    args = {"max_model_len": 64, "cpu_threads": 1, "device": "cpu", "skip_tokenizer_init": True}
    config = changed(worker_config(make_plan(EngineArgs(model=str(folder), **args | options))))
    memories = memories_of([read_spec(config.model.hf_config)])
    pool = plan_kv_pool(memories, config.memory.block_size, config.number_bytes)
    return root_parts(config, open_platform(config), pool, model_files(config), place)


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "cache" / "file_digests.json"


def test_equal_engines_have_one_root(folder, kept):
    assert parts_of(folder).name(kept) == parts_of(folder).name(kept) is not None
    assert parts_of(folder, served_model_name="other", max_num_seqs=3).name(kept) == (
        parts_of(folder).name(kept)
    )


DIFFERENCES = {
    "dtype": {"dtype": "float32"},
    "K/V dtype": {"kv_cache_dtype": "int8"},
    "quantisation": {"quantization": "int8"},
    "config": {"hf_overrides": {"rms_norm_eps": 0.5}},
    "block size": {"block_size": 16},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "place": {"place": (1, 2)},
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_another_root(name, folder, kept):
    assert parts_of(folder, **DIFFERENCES[name]).name(kept) != parts_of(folder).name(kept)


@pytest.mark.parametrize("what", ["code", "provider", "instruction set", "torch", "libraries"])
def test_other_arithmetic_is_another_root(what, folder, kept, monkeypatch):
    before = parts_of(folder).name(kept)
    if what == "code":
        monkeypatch.setattr(tier_root, "_code_digest", lambda: "other")
    elif what == "provider":
        monkeypatch.setattr(tier_root, "find_native", lambda: (None, ""))
    elif what == "instruction set":
        monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    elif what == "libraries":
        monkeypatch.setattr(tier_root.torch.backends.cpu, "get_cpu_capability", lambda: "other")
    else:
        monkeypatch.setattr(tier_root.torch, "__version__", "0.0")
    assert parts_of(folder).name(kept) != before


def test_the_version_of_transformers_counts_where_its_code_runs(folder, kept, monkeypatch):
    def with_transformers(version):
        monkeypatch.setattr("transformers.__version__", version)
        own = parts_of(folder).name(kept)
        return own, parts_of(folder, model_impl="transformers").name(kept)

    (own, foreign), (own_later, foreign_later) = map(with_transformers, ("5.0", "5.1"))
    assert own == own_later and foreign != foreign_later


def test_code_of_plugins_is_in_the_root(folder, kept, tmp_path, monkeypatch):
    module = ModuleType("acme_of_a_test")
    module.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tier_root, "records", list)
    names = [parts_of(folder).name(kept)]

    def installed(version, group="general_plugins"):
        value = f"{module.__name__}.part:register"
        point = EntryPoint("quire", group, "acme", value, "acme", version, str(tmp_path))
        monkeypatch.setattr(tier_root, "records", lambda: [PluginRecord(point, ["op provider x"])])
        names.append(parts_of(folder).name(kept))

    installed("1", group="stat_logger_plugins")
    assert names[0] == names[1], "it computes nothing"
    installed("1")
    installed("2")
    (tmp_path / "part.py").write_text("other = 1")
    installed("2")
    assert len({*names[1:]}) == 4


def test_code_of_kernels_is_in_the_digest_of_code(tmp_path, monkeypatch):
    package = tmp_path / "quire"
    for name in ("executor/kv_tier/root.py", "ops/sum.py", "_native.so", "server/page.py"):
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one")
    monkeypatch.setattr(tier_root, "__file__", str(package / "executor" / "kv_tier" / "root.py"))
    before = tier_root._code_digest()
    (package / "server" / "page.py").write_text("two")
    assert tier_root._code_digest() == before
    for name in ("ops/sum.py", "_native.so"):
        (package / name).write_text("two")
        assert tier_root._code_digest() != before
        (package / name).write_text("one")


def test_weights_count_by_their_contents(folder, kept, tmp_path):
    same = make_checkpoint(tmp_path / "a" / "llama", {"num_hidden_layers": 1}, "llama")
    other = make_checkpoint(tmp_path / "b" / "llama", {"num_hidden_layers": 1}, "llama", seed=9)
    assert parts_of(same).name(kept) == parts_of(folder).name(kept)
    assert parts_of(other).name(kept) != parts_of(folder).name(kept)


def test_a_file_that_was_written_since_the_start_has_no_root(kept, tmp_path):
    copy = make_checkpoint(tmp_path / "a" / "llama", {"num_hidden_layers": 1}, "llama")
    parts = parts_of(copy)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert parts.name(kept) is None
    assert parts_of(copy).name(kept) is not None


def test_files_are_read_once(folder, kept, monkeypatch):
    before = parts_of(folder).name(kept)
    monkeypatch.setattr(tier_root, "_digest", lambda path: pytest.fail(f"{path} is read again"))
    assert parts_of(folder).name(kept) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"/x": 3}'])
def test_kept_digests_that_cannot_be_read_are_made_again(text, folder, kept):
    before = parts_of(folder).name(kept)
    kept.write_text(text)
    assert parts_of(folder).name(kept) == before


def test_the_seed_counts_only_where_weights_are_drawn(folder, kept):
    def drawn(seed):
        def changed(config):
            model = msgspec.structs.replace(config.model, load_format="dummy", seed=seed)
            return replace(config, model=model)

        return parts_of(folder, changed).name(kept)

    assert parts_of(folder, seed=1).name(kept) == parts_of(folder, seed=2).name(kept)
    assert drawn(1) != drawn(2)
