"""The load formats give the same model, and each refuses what it cannot read in one sentence."""

import json
import os
import pickle
import shutil
import sys
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts, make_plan
from quire.errors import (
    CorruptCheckpoint,
    InvalidParameter,
    LoadError,
    NotBuiltYet,
    UnknownConfigKey,
    UnsupportedConfigValue,
    WeightMismatch,
)
from quire.models import read_spec
from quire.models.loading.folder_files import found_format, read_folder_config
from quire.models.loading.sharded_state import ShardedLeaves
from quire.models.spec import PipelineStage
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, same_bits, serve
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full


def load_folder(folder, load_format="auto"):
    return load(folder, read_spec(read_folder_config(folder, load_format)), load_format=load_format)


def same_logits(folder, made, load_format):
    got = run_full(load_folder(folder, load_format), made.prompts)
    return relative_error(got, made.logits) < TOLERANCE


# pickles


@pytest.fixture
def pickled(checkpoints, tmp_path):
    """A copy of a checkpoint with its weights in pytorch_model.bin."""
    folder = shutil.copytree(checkpoints["llama"].folder, tmp_path / "pickled")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"step": 3}, folder / "training_args.bin")
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_are_unpickled(checkpoints, pickled, name, is_zip):
    tensors = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    torch.save(tensors, pickled / name, _use_new_zipfile_serialization=is_zip)
    assert found_format(pickled) == "pt"
    assert same_logits(pickled, checkpoints["llama"], "auto")
    assert same_logits(pickled, checkpoints["llama"], "pt")


def test_pickles_are_read_through_their_index(checkpoints, pickled):
    tensors = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    where = {}
    for part in (1, 2):
        file = f"pytorch_model-{part:05}-of-00002.bin"
        mine = names[part - 1 :: 2]
        torch.save({n: torch.nn.Parameter(tensors[n]) for n in mine}, pickled / file)
        where |= dict.fromkeys(mine, file)
    index = pickled / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert same_logits(pickled, checkpoints["llama"], "auto")
    index.write_text(json.dumps({"weight_map": {**where, names[0]: where[names[1]]}}))
    with pytest.raises(WeightMismatch, match=f"promises {names[0]}"):
        load_folder(pickled)
    index.write_text(json.dumps({"weight_map": {**where, names[0]: "/etc/passwd"}}))
    with pytest.raises(CorruptCheckpoint, match="file names in its folder that end with .bin"):
        load_folder(pickled)


class Poison:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


POISONED = {
    "a zip": lambda content, file: torch.save(content, file),
    "before torch 1.6": lambda content, file: torch.save(
        content, file, _use_new_zipfile_serialization=False
    ),
    "a bare pickle": lambda content, file: file.write_bytes(pickle.dumps(content, 2)),
}


@pytest.mark.parametrize("form", POISONED)
def test_nothing_but_tensors_is_unpickled(pickled, tmp_path, form):
    proof = tmp_path / "was-run"
    content = {"model.norm.weight": Poison(f"touch {proof}")}
    POISONED[form](content, pickled / "pytorch_model.bin")
    with pytest.raises(CorruptCheckpoint, match="asks for posix.system .* so it is not read") as e:
        load_folder(pickled)
    assert "\n" not in str(e.value)
    assert not proof.exists()


def compressed(folder):
    file = folder / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        parts = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in parts.items():
            archive.writestr(entry, content)


def saved(content):
    return lambda folder: torch.save(content, folder / "pytorch_model.bin")


def cut(keep):
    def edit(folder):
        file = folder / "pytorch_model.bin"
        file.write_bytes(file.read_bytes()[:keep])

    return edit


def with_records(**records):
    """The archive with other content in the records whose names end so; a list: one for each."""

    def edit(folder):
        file = folder / "pytorch_model.bin"
        with zipfile.ZipFile(file) as archive:
            parts = {entry: archive.read(entry) for entry in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of two records with one name
            for name, content in parts.items():
                changed = records.get(name.rpartition("/")[2].partition(".")[0], [content])
                for some in changed:
                    archive.writestr(name, some)

    return edit


def without_zip(content, *changes):
    """A file in the form from before torch 1.6, with some of its bytes replaced."""

    def edit(folder):
        file = folder / "pytorch_model.bin"
        torch.save(content, file, _use_new_zipfile_serialization=False)
        data = file.read_bytes()
        for old, new in changes:
            assert old in data
            data = data.replace(old, new)
        file.write_bytes(data)

    return edit


def pickled_as(body):
    """The archive with a pickle of one item; `body` makes its key and its value."""
    return with_records(data=[b"\x80\x02}" + body + b"s."])


TEXT = b"X\x01\x00\x00\x00a"
DOUBLED = b"".join(bytes([*b"h", i, *b"h", i, *b"\x86q", i + 1]) for i in range(22))
PAIRS = TEXT + b"\x85q\x00" + DOUBLED
"""A tuple, the pair of it and itself, and so on: one more pair doubles the time of its hash."""
ARRAY = TEXT + b"cbuiltins\nbytearray\nJ\x00\x00\x00\x04\x85R"
SPOILED = {
    "a byte array": (pickled_as(ARRAY), "asks for builtins.bytearray"),
    "tuples of themselves": (pickled_as(PAIRS + TEXT), "has one tuple in several places"),
    "an empty stack": (pickled_as(b"\x86"), "a value is taken from an empty stack"),
    "another storage": (pickled_as(TEXT + TEXT + b"Q"), "names a storage in another way"),
    "a long text": (pickled_as(b"X\xff\xff\xff\x7fa"), "is not a valid file of torch.save"),
    "a short record": (with_records(**{"0": [b"1234"]}), "data/0 has 4 bytes, and the tensors"),
    "no record": (with_records(**{"0": []}), "data/0 has no bytes, and the tensors"),
    "two records": (with_records(**{"0": [b"1", b"2"]}), "has two records of one name"),
    "large storages": (
        without_zip({"a": torch.ones(77)}, (b"K\x4d", b"J\x00\x00\x00\x40")),
        "the tensors in it need 4294967296",
    ),
    "compressed": (compressed, "is compressed, which torch.save never does"),
    "a list": (saved([torch.ones(1)]), "holds a list, not a dict of tensors"),
    "numbers": (saved({"epoch": 3}), "'epoch' is a int, and a checkpoint has only tensors"),
    "a wrapper": (saved({"state_dict": {"a": torch.ones(1)}}), "is a dict, and a checkpoint has"),
    "other keys": (saved({3: torch.ones(1)}), "'3' is a Tensor"),
    "sparse": (saved({"a": torch.eye(3).to_sparse()}), "a is not a plain tensor"),
    "without values": (saved({"a": torch.ones(3, device="meta")}), "a is not a plain tensor"),
    "another protocol": (
        lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}, 4)),
        "has the pickle instruction FRAME.*Use a safetensors version",
    ),
    "empty": (cut(0), "is not a valid file of torch.save"),
    "truncated": (cut(-3000), "is an archive whose end is missing"),
    "a few bytes": (cut(100), "is an archive whose end is missing"),
    "a page": (
        lambda folder: (folder / "pytorch_model.bin").write_text("<!DOCTYPE html>"),
        "is not a valid file of torch.save",
    ),
}


def test_old_files_of_a_gpu_are_unpickled(checkpoints, pickled):
    tensors = load_file(checkpoints["llama"].folder / "model.safetensors")
    (pickled / "model.safetensors").unlink(missing_ok=True)
    without_zip(tensors, (b"ctorch\nFloatStorage", b"ctorch.cuda\nFloatStorage"))(pickled)
    assert same_logits(pickled, checkpoints["llama"], "pt")


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_pickle_is_one_sentence(pickled, case):
    edit, says = SPOILED[case]
    edit(pickled)
    with pytest.raises(LoadError, match=says) as caught:
        load_folder(pickled)
    assert "\n" not in str(caught.value)


def test_a_pickle_of_absurd_size_is_not_read(pickled, monkeypatch):
    monkeypatch.setattr("quire.models.loading.readers.pickled_files.MOST_PICKLE_BYTES", 100)
    with pytest.raises(CorruptCheckpoint, match="may have at most 100"):
        load_folder(pickled)


def test_a_pickle_of_countless_instructions_is_not_unpickled(pickled, monkeypatch):
    monkeypatch.setattr("quire.models.loading.readers.pickle_scan._MOST_OPCODES", 100)
    with pytest.raises(CorruptCheckpoint, match="has more than 100 instructions"):
        load_folder(pickled)


def test_missing_and_ambiguous_pickles(pickled):
    shutil.copy(pickled / "pytorch_model.bin", pickled / "a.bin")
    (pickled / "pytorch_model.bin").rename(pickled / "b.bin")
    with pytest.raises(LoadError, match=r"has a\.bin, b\.bin, but no pytorch_model\.bin\.index"):
        load_folder(pickled)
    (pickled / "a.bin").unlink()
    (pickled / "b.bin").unlink()
    with pytest.raises(LoadError, match=r"has no weights in \*\.bin or \*\.pt"):
        load_folder(pickled, "pt")


# Mistral's own files

RENAMED = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    "mlp.gate": "feed_forward.gate",
}


def as_released(made, folder, **extra):
    """The checkpoint as Mistral releases it: other names, rotated rows next to each other."""
    config = json.loads((made.folder / "config.json").read_text())
    head_dim = config["head_dim"]
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": head_dim,
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_seq_len": config["max_position_embeddings"],
        "sliding_window": config["sliding_window"],
        **extra,
    }
    released = {}
    for name, tensor in load_file(made.folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.view(-1, 2, head_dim // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        released[name] = tensor
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    save_file(released, folder / "consolidated.safetensors")
    return folder


FAMILIES = {
    "mistral": lambda config: {},
    "ministral": lambda config: {
        "sliding_window": [
            config["sliding_window"] if kind == "sliding_attention" else None
            for kind in config["layer_types"]
        ]
    },
    "mixtral": lambda config: {
        "moe": {
            "num_experts": config["num_local_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
        }
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_mistrals_own_files_are_the_same_model(checkpoints, tmp_path, family):
    made = checkpoints[family]
    config = json.loads((made.folder / "config.json").read_text())
    folder = as_released(made, tmp_path / "released", **FAMILIES[family](config))
    assert found_format(folder) == "mistral"
    assert same_logits(folder, made, "auto")
    shutil.copy(made.folder / "config.json", folder)
    assert same_logits(folder, made, "mistral")


PARAMS = {
    "quantised": ({"quantization": {"qformat_weight": "fp8_e4m3"}}, UnsupportedConfigValue),
    "vision": ({"vision_encoder": {"hidden_size": 3}}, UnsupportedConfigValue),
    "yarn": ({"yarn": {"factor": 16}}, UnsupportedConfigValue),
    "latent": ({"kv_lora_rank": 512}, UnsupportedConfigValue),
    "windows": ({"sliding_window": [4, None]}, UnsupportedConfigValue),
    "experts": ({"moe": {"num_experts": 3, "capacity": 2}}, UnsupportedConfigValue),
    "another key": ({"lora": {"rank": 8}}, UnknownConfigKey),
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_theta": 2**70}, r"params\.json has a value that is not plain data"),
        ({"n_layers": 10**12, "sliding_window": [4, None]}, r"params\.json: sliding_window=\[4, N"),
    ],
)
def test_params_with_numbers_that_are_too_large_are_refused(checkpoints, tmp_path, changes, says):
    folder = as_released(checkpoints["mistral"], tmp_path / "released", **changes)
    with pytest.raises(LoadError, match=says):
        read_folder_config(folder, "auto")


@pytest.mark.parametrize("case", PARAMS)
def test_params_that_are_not_known_are_refused_by_key(checkpoints, tmp_path, case):
    changes, kind = PARAMS[case]
    folder = as_released(checkpoints["mistral"], tmp_path / "released", **changes)
    with pytest.raises(kind, match=rf"params\.json: .*{next(iter(changes))}"):
        load_folder(folder)


def test_mistrals_files_need_their_params(checkpoints):
    with pytest.raises(LoadError, match=r"has no params\.json, which load_format='mistral'"):
        load_folder(checkpoints["mistral"].folder, "mistral")


def test_a_weight_under_two_names_is_refused(checkpoints, tmp_path):
    folder = as_released(checkpoints["mistral"], tmp_path / "released")
    file = folder / "consolidated.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["norm.weight"].clone()}, file)
    with pytest.raises(WeightMismatch, match="are the same weight"):
        load_folder(folder)


# a worker's own part


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder whose model can be cut over two workers."""
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_saved_state_is_the_same_model(tiny, tmp_path, num_workers):
    folder = tmp_path / "saved"
    core = open_core(tiny, num_workers)
    right = serve(core)
    files = core.save_sharded_state(str(folder), max_size=100_000)
    core.shutdown()
    assert all(os.path.getsize(file) < 600_000 for file in files) and len(files) > num_workers
    shutil.copy(tiny / "config.json", folder)
    again = open_core(folder, num_workers, load_format="sharded_state")
    found = serve(again)
    assert found.tokens == right.tokens and same_bits(found, right)
    again.shutdown()
    with pytest.raises(LoadError, match="Save them again"):
        open_core(folder, 3 - num_workers, load_format="sharded_state")


@pytest.mark.parametrize("saved", ["rank-{r}", "pp-{p}-tp-{r}"])
@pytest.mark.parametrize("size,stage", [(1, None), (4, None), (1, 0), (1, 1), (1, 2), (4, 2)])
def test_the_state_of_other_workers_is_refused_with_their_sizes(tmp_path, saved, size, stage):
    """Three stages of two workers, or two workers alone."""
    for name in {saved.format(p=p, r=r) for p in range(3) for r in range(2)}:
        (tmp_path / f"model-{name}-part-0.safetensors").touch()
    own = None if stage is None else PipelineStage(stage, stage + 1, 3, stage)
    sizes = "tensor_parallel_size=2 and pipeline_parallel_size=" + (
        "3, with" if "p" in saved else "1"
    )
    with pytest.raises(LoadError, match=sizes):
        ShardedLeaves(tmp_path, 0, size, {}, own)
    if (stage is None) == ("p" in saved):
        with pytest.raises(LoadError, match=sizes):
            ShardedLeaves(tmp_path, 0, 2, {}, own)


def test_saving_through_an_engine(tiny, tmp_path):
    llm = LLM(model=str(tiny), skip_tokenizer_init=True, load_format="dummy", quantization="int8")
    params = SamplingParams(max_tokens=4, temperature=0)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    right = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert llm.save_sharded_state(tmp_path) == [f"{tmp_path}/model-rank-0-part-0.safetensors"]
    with pytest.raises(InvalidParameter, match="pattern='x'"):
        llm.save_sharded_state(tmp_path, "x")
    with pytest.raises(InvalidParameter, match="max_size=0"):
        llm.save_sharded_state(tmp_path, max_size=0)
    with pytest.raises(LoadError, match="cannot be written to /proc"):
        llm.save_sharded_state("/proc/nowhere")
    llm.close()
    shutil.copy(tiny / "config.json", tmp_path)
    again = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        load_format="sharded_state",
        quantization="int8",
    )
    assert again.generate(prompt, params)[0].outputs[0].token_ids == right
    again.close()


# names


@pytest.mark.parametrize(
    ("load_format", "says"),
    [
        ("npcache", "use 'pt'"),
        ("tensorizer", "A plugin can register it"),
        ("bitsandbytes", "says how it is quantised"),
        ("gguf", "safetensors files of the same model"),
        ("fastsafetensors", "A plugin can register it"),
        ("runai_streamer_sharded", "sharded_state"),
    ],
)
def test_other_formats_are_refused_by_name(load_format, says):
    with pytest.raises(NotBuiltYet, match=f"load_format='{load_format}'.*{says}"):
        make_plan(EngineArgs(load_format=load_format))


def test_a_plan_names_the_files_that_are_read(pickled, tiny):
    def chosen(folder, load_format):
        args = EngineArgs(model=str(folder), load_format=load_format, skip_tokenizer_init=True)
        return gather_model_facts(args).weights_format

    assert chosen(pickled, "auto") == chosen(pickled, "hf") == "pt"
    assert chosen(tiny, "hf") == chosen(tiny, "auto") == "safetensors"
    assert chosen(tiny, "dummy") == "dummy"


class Streamer:
    """Stands in for the package's class: gives the tensors of a file in a buffer that it reuses."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def stream_file(self, path):
        self.tensors = load_file(path)

    def get_tensors(self):
        for name, tensor in self.tensors.items():
            yield name, tensor
            tensor.zero_()


def test_files_are_streamed(checkpoints, monkeypatch):
    made = checkpoints["llama"]
    with pytest.raises(LoadError, match=r"install quire\[runai\]"):
        load_folder(made.folder, "runai_streamer")
    package = type(sys)("runai_model_streamer")
    package.SafetensorsStreamer = Streamer
    package.__spec__ = type(sys)("spec")
    monkeypatch.setitem(sys.modules, "runai_model_streamer", package)
    assert same_logits(made.folder, made, "runai_streamer")
