"""Weight files that lie: one sentence each, before memory is taken."""

import json
import os
import shutil
import tracemalloc

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts
from quire.errors import CorruptCheckpoint, LoadError
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.readers import checkpoint_files
from quire.models.loading.weight_index import read_index
from tests.models.paged_driver import load

NAME = "model.norm.weight"


@pytest.fixture
def folder(checkpoints, tmp_path):
    return shutil.copytree(checkpoints["llama"].folder, tmp_path / "model")


def load_folder(folder, load_format="safetensors"):
    return load(folder, read_spec(read_config(folder)), load_format=load_format)


def rewrite(folder, edit):
    """Rewrite the header's text after `edit(text)`."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = edit(data[8 : 8 + size].decode().rstrip()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def changed(**facts):
    def edit(text):
        header = json.loads(text)
        header[NAME] |= facts
        return json.dumps(header)

    return edit


def overlapping(text):
    """Two tensors of one size in the same place."""
    header = json.loads(text)
    header[NAME]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    return json.dumps(header)


def twice(text):
    header = json.loads(text)
    return text[:-1] + f', "{NAME}": {json.dumps(header[NAME])}}}'


HEADERS = {
    "overlapping": (overlapping, "model.safetensors is not a valid safetensors file"),
    "the same name twice": (twice, "a name is there twice"),
    "a shape of 2**62": (changed(shape=[2**62, 2**62]), "is not a valid safetensors file"),
    "a shape of zeros": (changed(shape=[0] * 9), "is not a valid safetensors file"),
    "no integers": (changed(shape=[1.5]), "is not a valid safetensors file"),
    "a type of nobody": (changed(dtype="F7"), "is not a valid safetensors file"),
    "a type of another size": (changed(dtype="F64"), "is not a valid safetensors file"),
    "a list": (lambda text: "[1]", "is not a valid safetensors file"),
    "depth": (lambda text: "[" * 100_000, "is not a valid safetensors file"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies(folder, case):
    edit, says = HEADERS[case]
    rewrite(folder, edit)
    with pytest.raises(CorruptCheckpoint, match=says) as caught:
        load_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [17 << 20, 1 << 32, 2**63, 2**64 - 1])
def test_a_header_of_gigabytes_takes_no_memory(folder, size):
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(size.to_bytes(8, "little"))
        stream.truncate(min(size + 9, 1 << 40))
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    before = psutil.Process().memory_info().rss
    for read in (
        load_folder,
        lambda folder: gather_model_facts(EngineArgs(model=str(folder), skip_tokenizer_init=True)),
    ):
        with pytest.raises(CorruptCheckpoint, match=f"its header would have {size} bytes"):
            read(folder)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_file_that_has_not_been_fetched(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(CorruptCheckpoint, match="is a pointer of Git LFS .* `git lfs pull`"):
        load_folder(folder)


def test_a_shape_as_large_as_a_sparse_file(folder):
    """A tebibyte that is not what the model has: refused by shape, or where it cannot be mapped."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != NAME}
    save_file(kept, folder / "model.safetensors")

    def add(text):
        header = json.loads(text)
        end = max(entry["data_offsets"][1] for entry in header.values())
        header[NAME] = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [end, end + (1 << 40)]}
        return json.dumps(header)

    rewrite(folder, add)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size + (1 << 40))
    before = psutil.Process().memory_info().rss
    with pytest.raises(
        LoadError, match=rf"wrong shape {NAME} \[274877906944\]|cannot be mapped: the"
    ):
        load_folder(folder)
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    "file",
    [
        *("../model.safetensors", "/etc/model.safetensors", "..", "a/model.safetensors"),
        *("model.safetensors\0", "a\0.safetensors", "", None, 3, ["model.safetensors"]),
        *("model.safetensors/../../model.safetensors", "a" * 5000 + ".safetensors"),
    ],
    ids=lambda file: repr(file)[:30],
)
def test_an_index_names_files_of_its_folder_only(folder, file):
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
    index = {"weight_map": {NAME: file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match="weight_map must map tensor|Expected `str`, got"):
        load_folder(folder)


INDICES = {
    "a list": ("[]", "is not a weight index: Expected `object`, got `array`"),
    "empty": ("", "is not a weight index: Input data was truncated"),
    "no map": ("{}", "is not a weight index: Object missing required field `weight_map`"),
    "depth": ('{"weight_map": ' + "[" * 100_000, "is not a weight index"),
    "a name of lines": (
        '{"weight_map": {"a\\nb": "model.safetensors"}}',
        r"has a tensor .*'a\\nb'",
    ),
    "a long name": (
        f'{{"weight_map": {{"{"a" * 256}": "model.safetensors"}}}}',
        "has a tensor whose name is longer than 255 characters",
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_lies(folder, case):
    text, says = INDICES[case]
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=f"model.safetensors.index.json.*{says}") as caught:
        load_folder(folder)
    assert "\n" not in str(caught.value) and "Error" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_is_not_read_of_an_index_takes_no_memory(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"metadata": [' + "{}," * 3_000_000 + '{}], "weight_map": {}}')
    tracemalloc.start()
    assert read_index(path, ".safetensors") == {}
    assert tracemalloc.get_traced_memory()[1] < 120 << 20  # objects alone would take 200
    tracemalloc.stop()
    path.write_text('{"weight_map": {' + '"a":"b",' * 1_000_000 + '"a":"b"}}')
    with pytest.raises(CorruptCheckpoint, match="it has too many entries"):
        read_index(path, ".safetensors")


@pytest.mark.parametrize("name", ["a" * 256, "a\nb", "\x1b[31mred", "a\ud800"])
@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_a_name_that_no_message_could_show(folder, name, load_format):
    if load_format == "pt":
        (folder / "model.safetensors").unlink()
        torch.save({name: torch.ones(1)}, folder / "pytorch_model.bin")
    elif name.isascii():
        save_file({name: torch.ones(1)}, folder / "model.safetensors")
    else:
        return  # no safetensors file can have it
    with pytest.raises(CorruptCheckpoint, match="a tensor whose name is longer than 255 char") as e:
        load_folder(folder, load_format)
    assert str(e.value).isprintable() and len(str(e.value)) < 500


def test_a_file_without_room_is_not_called_broken(folder, monkeypatch):
    def refuse(*_):
        raise RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)")

    monkeypatch.setattr(checkpoint_files, "safe_open", refuse)
    with pytest.raises(LoadError, match=r"cannot be mapped: .* or store the weights in smaller f"):
        load_folder(folder)


def test_links_are_followed(folder):
    """As the hub's cache has them."""
    file = folder / "model.safetensors"
    blob = file.rename(folder.parent / "blob")
    file.symlink_to("../blob")
    assert load_folder(folder).num_layers == 3
    blob.unlink()
    with pytest.raises(LoadError, match="is a link to '../blob', which is not there"):
        load_folder(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_a_weight_of_another_type_is_refused(folder, dtype, load_format):
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = torch.ones(64, dtype=dtype)
    (folder / "model.safetensors").unlink()
    if load_format == "pt":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LoadError, match=f"{NAME} is stored as"):
        load_folder(folder, load_format)
