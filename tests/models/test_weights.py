"""Loading is exact: each tensor and parameter once, each broken file one clear error."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CorruptCheckpoint, LoadError, WeightMismatch
from quire.models import find_family, read_spec
from quire.models.config_reader import read_config
from quire.models.loading.matching import match
from quire.models.loading.readers.checkpoint_files import CheckpointFiles
from quire.models.loading.transforms import from_leaves, to_leaves
from tests.models.hostile.models import cases
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full


def copied(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "copy")


def change(folder, edit):
    """Rewrite the only weight file after `edit(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_folder(folder, **keywords):
    return load(folder, read_spec(read_config(folder)), **keywords)


@pytest.mark.parametrize("name", cases())
def test_weight_rules_can_be_undone(checkpoints, name):
    made = checkpoints[name]
    config = read_config(made.folder)
    spec = read_spec(config)
    stored = load_file(made.folder / "model.safetensors")
    files = CheckpointFiles(made.folder)
    for entry in match(find_family(config), spec, files):
        leaves = to_leaves(entry, stored[entry.name])
        assert [tuple(leaf.shape) for leaf in leaves] == [p.shape for p in entry.leaves]
        assert torch.equal(from_leaves(entry, leaves), stored[entry.name])
    files.close()


MISFITS = {
    "missing": (
        lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
        "missing model.layers.1.self_attn.k_proj.weight",
    ),
    "extra": (
        lambda t: t.update({"model.layers.9.self_attn.k_proj.weight": torch.ones(2)}),
        "unknown model.layers.9.self_attn.k_proj.weight",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(63)}),
        r"wrong shape model.norm.weight \[63\] instead of \[64\]",
    ),
    "transposed": (
        lambda t: t.update(
            {"lm_head.weight": t["lm_head.weight"].t().contiguous()},
        ),
        r"wrong shape lm_head.weight \[64, 96\] instead of \[96, 64\]",
    ),
    "renamed": (
        lambda t: t.update({"model.final.weight": t.pop("model.norm.weight")}),
        "missing model.norm.weight; unknown model.final.weight",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_must_fit_exactly(checkpoints, tmp_path, case):
    edit, text = MISFITS[case]
    folder = copied(checkpoints["llama"], tmp_path)
    change(folder, edit)
    with pytest.raises(WeightMismatch, match=text):
        load_folder(folder)


def test_a_quantised_tensor_is_refused(checkpoints, tmp_path):
    folder = copied(checkpoints["llama"], tmp_path)
    change(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(LoadError, match="model.norm.weight is stored as I8"):
        load_folder(folder)


def test_many_problems_are_listed_shortly(checkpoints, tmp_path):
    folder = copied(checkpoints["llama"], tmp_path)
    change(folder, lambda t: [t.pop(n) for n in list(t) if "layers.2" in n])
    with pytest.raises(WeightMismatch, match="and 10 more") as caught:
        load_folder(folder)
    assert len(str(caught.value)) < 600


def shard(folder, parts=3):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        mine = {n: tensors[n] for n in names[part::parts]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(mine, file)
    write_index(folder, where)
    return where


def write_index(folder, where):
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_files_are_read_through_their_index(checkpoints, tmp_path):
    made = checkpoints["mixtral"]
    folder = copied(made, tmp_path)
    shard(folder)
    save_file({"stray": torch.ones(1)}, folder / "consolidated.safetensors")
    got = run_full(load_folder(folder), made.prompts)
    assert relative_error(got, made.logits) < TOLERANCE


def test_an_index_must_tell_the_truth(checkpoints, tmp_path):
    folder = copied(checkpoints["llama"], tmp_path)
    where = shard(folder)
    name, file = sorted(where.items())[0]
    other = next(f for f in where.values() if f != file)
    write_index(folder, {**where, name: other})
    with pytest.raises(WeightMismatch, match=f"promises {name} in {other}"):
        load_folder(folder)
    write_index(folder, {**where, "ghost": file})
    with pytest.raises(WeightMismatch, match="promises ghost .*in no file"):
        load_folder(folder)
    write_index(folder, {**where, name: "../elsewhere.safetensors"})
    with pytest.raises(CorruptCheckpoint, match="file names"):
        load_folder(folder)
    write_index(folder, where)
    (folder / file).unlink()
    with pytest.raises(CorruptCheckpoint, match=f"{file} is missing"):
        load_folder(folder)


def test_a_tensor_may_be_stored_once_only(checkpoints, tmp_path):
    folder = copied(checkpoints["llama"], tmp_path)
    where = shard(folder)
    first, second = sorted(set(where.values()))[:2]
    tensors = load_file(folder / first)
    name = next(iter(tensors))
    twice = load_file(folder / second) | {name: tensors[name]}
    save_file(twice, folder / second, metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match=f"{name} is stored twice"):
        load_folder(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_one_clear_error(checkpoints, tmp_path, text):
    folder = copied(checkpoints["llama"], tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"index\.json"):
        load_folder(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1, -5000])
def test_a_truncated_file_is_one_clear_error(checkpoints, tmp_path, keep):
    folder = copied(checkpoints["llama"], tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors is not a valid"):
        load_folder(folder)


def lying_headers(header):
    """Headers that claim what the file does not have."""
    name = "model.norm.weight"
    start, end = header[name]["data_offsets"]
    for change in (
        {"shape": [2**62, 4]},
        {"shape": [-64]},
        {"data_offsets": [start, end + 4]},
        {"data_offsets": [end, start]},
        {"data_offsets": [0, end - start]},
        {"data_offsets": [2**63, 2**63 + 256]},
        {"dtype": "F64"},
        {"dtype": "F1024"},
    ):
        yield {**header, name: {**header[name], **change}}


def test_a_lying_header_is_one_clear_error(checkpoints, tmp_path):
    folder = copied(checkpoints["llama"], tmp_path)
    file = folder / "model.safetensors"
    original = file.read_bytes()
    length = int.from_bytes(original[:8], "little")
    for lie in lying_headers(json.loads(original[8 : 8 + length])):
        text = json.dumps(lie).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + original[8 + length :])
        with pytest.raises(CorruptCheckpoint):
            load_folder(folder)


def test_no_corruption_of_a_header_escapes(checkpoints, tmp_path):
    """Random bytes in length and header: an error of ours, or (a harmless byte) a model."""
    folder = copied(checkpoints["llama"], tmp_path)
    file = folder / "model.safetensors"
    original = file.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    rng = random.Random(11)
    for _ in range(150):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(header)] = rng.randrange(256)
        file.write_bytes(data)
        try:
            load_folder(folder)
        except LoadError as error:
            assert str(error)


def test_files_without_an_index_are_not_guessed_at(checkpoints, tmp_path):
    folder = copied(checkpoints["llama"], tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert load_folder(folder).num_layers == 3
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(LoadError, match=r"a\.safetensors, b\.safetensors, but no model"):
        load_folder(folder)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_old_files_carry_buffers_and_no_prefix(checkpoints, tmp_path, name):
    made = checkpoints[name]
    folder = copied(made, tmp_path)
    prefix, buffers = {
        "llama": ("model.", ["layers.0.self_attn.rotary_emb.inv_freq"]),
        "gpt2": ("transformer.", ["h.0.attn.bias", "h.2.attn.masked_bias"]),
    }[name]

    def age(tensors):
        for stored in list(tensors):
            tensors[stored.removeprefix(prefix)] = tensors.pop(stored)
        tensors |= {buffer: torch.ones(1) for buffer in buffers}

    change(folder, age)
    got = run_full(load_folder(folder), made.prompts)
    assert relative_error(got, made.logits) < TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out(checkpoints, tmp_path, caplog):
    made = checkpoints["glm4_moe"]
    folder = copied(made, tmp_path)

    def add(tensors):
        for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight"):
            tensors[f"model.layers.3.{name}"] = torch.ones(1)

    change(folder, add)
    with caplog.at_level("INFO", logger="quire"):
        model = load_folder(folder)
    assert relative_error(run_full(model, made.prompts), made.logits) < TOLERANCE
    assert "(model.layers.3.eh_proj.weight, model.layers.3.mlp.experts.0" in caplog.text
    change(folder, lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(1)}))
    with pytest.raises(WeightMismatch, match=r"unknown model\.layers\.2\.eh_proj"):
        load_folder(folder)


def test_a_tied_head_may_be_stored_as_a_copy_only(checkpoints, tmp_path):
    made = checkpoints["gemma2"]
    folder = copied(made, tmp_path)
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert relative_error(run_full(load_folder(folder), made.prompts), made.logits) < TOLERANCE
    change(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(WeightMismatch, match="lm_head.weight differs from model.embed_tokens"):
        load_folder(folder)


def test_the_model_outlives_its_files(checkpoints, tmp_path):
    made = checkpoints["starcoder2"]
    folder = copied(made, tmp_path)
    model = load_folder(folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert relative_error(run_full(model, made.prompts), made.logits) < TOLERANCE


def test_dummy_weights_need_no_files_and_follow_their_seed(checkpoints, tmp_path):
    made = checkpoints["gpt_oss"]
    spec = read_spec(read_config(made.folder))
    runs = [
        run_full(load(tmp_path, spec, load_format="dummy", seed=seed), made.prompts)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], runs[2][0])
    assert 0.5 < runs[0][0].std() < 10


def test_no_two_dummy_weights_are_alike(checkpoints, tmp_path):
    spec = read_spec(read_config(checkpoints["qwen3"].folder))
    tensors = list(load(tmp_path, spec, load_format="dummy").parameters())
    firsts = {tuple(t.flatten()[:16].tolist()) for t in tensors}
    assert len(firsts) == len(tensors)


def test_learned_positions_bound_the_length(checkpoints):
    made = checkpoints["gpt2"]
    with pytest.raises(LoadError, match="max_model_len=65 is not possible"):
        load_folder(made.folder, max_model_len=65)
