"""Files of a tool's own beside a config.json that does not say how the weights are quantised."""

import json
import shutil

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts
from quire.errors import LoadError
from quire.models.loading.folder_files import read_folder_config
from quire.models.loading.source import locate
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, same_bits, serve
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, write

FILES = {
    "gptq-v1": ("quantize_config.json", lambda keys: keys),
    "awq": ("quant_config.json", lambda keys: keys | {"w_bit": keys["bits"], "bits": None}),
    "modelopt": (
        "hf_quant_config.json",
        lambda keys: {
            "producer": keys["producer"],
            "quantization": {k: keys[k] for k in ("quant_algo", "kv_cache_quant_algo")},
        },
    ),
}
"""Layout -> the file that says so, made of the keys that config.json would have."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    return make_checkpoint(tmp_path_factory.mktemp("plain"), shape, "qwen3", dtype="float32")


def written(plain, folder, name):
    """A checkpoint of this layout, with what is said of it in config.json."""
    write(plain, folder, (FORMATS | BYTE_FORMATS)[name])
    return folder


def with_side_file(source, folder, name):
    """The same, with that in a file of its own."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("plain"))
    config = json.loads((folder / "config.json").read_text())
    keys = config.pop("quantization_config")
    keys.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(config))
    file, content = FILES[name]
    (folder / file).write_text(json.dumps(content(keys)))
    return folder


def answers(folder):
    core = open_core(folder, 1)
    found = serve(core)
    core.shutdown()
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_bits_are_those_of_the_same_words_in_config_json(plain, tmp_path, name):
    source = written(plain, tmp_path / "model", name)
    folder = with_side_file(source, tmp_path / "beside", name)
    method = name.partition("-")[0]
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True)
    assert gather_model_facts(args).stored_as == method
    assert same_bits(answers(folder), answers(source))


def test_two_of_them_are_refused(plain, tmp_path):
    source = written(plain, tmp_path / "model", "awq")
    folder = with_side_file(source, tmp_path / "beside", "awq")
    (folder / "quantize_config.json").write_text("{}")
    with pytest.raises(
        LoadError, match=r"has quantize_config.json and quant_config.json, and conf"
    ):
        read_folder_config(folder, "auto")


def test_config_json_is_believed_first(plain, tmp_path):
    folder = written(plain, tmp_path / "model", "awq")
    (folder / "quantize_config.json").write_text("no JSON")
    assert read_folder_config(folder, "auto")["quantization_config"]["quant_method"] == "awq"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"bits": 3}, r"^quantize_config\.json: quantization_config\.bits=3 .*4 or 8"),
        ({"wish": 3}, r"^quantize_config\.json has keys .* quantization_config\.wish"),
        ({"bits": None}, r"^quantize_config\.json lacks quantization_config\.bits"),
        ({"damp_percent": 2**70}, r"quantize_config\.json has a value that is not plain data"),
    ],
    ids=["value", "key", "absence", "number"],
)
def test_what_is_wrong_in_one_is_said_of_it(plain, tmp_path, keys, says):
    folder = with_side_file(
        written(plain, tmp_path / "model", "gptq-v1"), tmp_path / "a", "gptq-v1"
    )
    file = folder / "quantize_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(LoadError, match=says):
        gather_model_facts(EngineArgs(model=str(folder), skip_tokenizer_init=True))


def test_they_are_fetched_from_the_hub(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, **keys: asked.update(keys) or "/nowhere"
    )
    locate("owner/name", what="config", load_format="safetensors")
    assert {file for file, _ in FILES.values()} <= set(asked["allow_patterns"])
