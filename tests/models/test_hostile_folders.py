"""A model folder that lies, or holds no files: one clear error, before memory is taken."""

import json
import os
import shutil
import socket

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts, make_plan
from quire.errors import LoadError
from quire.models import read_spec
from quire.models.loading.readers.checkpoint_files import CheckpointFiles
from quire.models.max_length import length_facts
from quire.testing import make_checkpoint
from quire.testing.model_shapes import FAMILIES, make_config
from quire.text.json_files import read_json
from quire.text.tokenizer import Tokenizer
from tests.models.hostile.models import HOSTILE, config_of

NASTY = [
    *(None, True, False, 0, -1, 3, 5000, 10**12, 2**64, 10**400),
    *(1.5, 0.0, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "128", "١٢٨", "\0", [], [None], ["x"], [1], {}, {"a": 1}),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("good") / "model", "tiny")


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


CONFIGS = {name: make_config("tiny", name) for name in FAMILIES}
CONFIGS |= {f"hostile {name}": config_of(HOSTILE[name]) for name in HOSTILE}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_of_every_key_is_taken_or_refused(name):
    config = CONFIGS[name]
    extra = ("rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types", "head_dim")
    for key in dict.fromkeys([*config, *extra]):
        for value in NASTY:
            try:
                spec = read_spec({**config, key: value})
                length_facts({**config, key: value})
            except LoadError as error:
                assert len(str(error)) <= 2000
            else:
                assert len(spec.blocks) < 5000, (key, value)


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 4096},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
    "longrope": {
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_every_value_in_a_rope_is_taken_or_refused(kind):
    config, rope = make_config("tiny", "llama"), {"rope_type": kind, **ROPES[kind]}
    for key in [*rope, "rope_theta", "partial_rotary_factor", "attention_factor"]:
        for value in [*NASTY, 1, [10**400] * 16, [float("nan")] * 16]:
            changed = {**config, "rope_scaling": {**rope, key: value}}
            try:
                read_spec(changed)
                length_facts(changed)
            except LoadError:
                continue


REFUSED = {
    "a billion layers": ({"num_hidden_layers": 5000}, "num_hidden_layers=5000 .* at most 4096"),
    "no limit of positions": (
        {"max_position_embeddings": 10**12},
        "max_position_embeddings=1000000000000 .* at most 999999999",
    ),
    "an empty vocabulary": ({"vocab_size": 0}, "vocab_size=0 .* at least 1"),
    "an end outside of the vocabulary": (
        {"eos_token_id": 1024},
        "eos_token_id=1024 .* an id below vocab_size=1024",
    ),
    "a negative end": ({"eos_token_id": [3, -1]}, r"eos_token_id=\[3, -1\]"),
    "an end that is a text": ({"eos_token_id": "0"}, "eos_token_id='0'"),
    "heads that do not divide": (
        {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
        "num_attention_heads=3 .* a divisor of hidden_size=128",
    ),
    "no head is left": (
        {"head_dim": None, "num_attention_heads": 256, "num_key_value_heads": 256},
        "a divisor of hidden_size=128",
    ),
    "more than a head rotates": ({"partial_rotary_factor": 1000.0}, "partial_rotary_factor=1000"),
    "nothing rotates": ({"partial_rotary_factor": 1e-9}, "an even number of head_dim=32"),
    "a base of one": ({"rope_theta": 1.0}, "rope_theta=1.0 .* at least 1.1"),
    "a type that is a number": ({"torch_dtype": 5}, "dtype=5"),
    "a length that is a text": ({"model_max_length": "8192"}, "model_max_length='8192'"),
    "a length below zero": ({"max_seq_len": -1}, "max_seq_len=-1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_be_is_refused_by_its_key(made, case):
    changes, says = REFUSED[case]
    args = EngineArgs(model=str(made), hf_overrides=changes, skip_tokenizer_init=True)
    with pytest.raises(LoadError, match=says):
        gather_model_facts(args)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eos_token_id": 10**6}, "eos_token_id=1000000 .* an id below vocab_size=1024"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"top_p": 2.0}, "top_p=2.0 .* override_generation_config"),
        ({"max_new_tokens": 1e308}, "max_tokens=1e.308"),
    ],
    ids=str,
)
def test_a_generation_config_that_no_request_could_use_is_refused(folder, changes, says):
    (folder / "generation_config.json").write_text(json.dumps(changes))
    with pytest.raises(LoadError, match=says):
        make_plan(EngineArgs(model=str(folder), skip_tokenizer_init=True))


def pipe(path):
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)  # somebody has it open: a reader waits without end


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


KINDS = {
    "a named pipe": pipe,
    "a socket": unix_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link to 'nowhere'": lambda path: path.symlink_to("nowhere"),
    "cannot be read: Too many levels": lambda path: path.symlink_to(path.name),
}
READERS = {
    "config.json": lambda folder: gather_model_facts(EngineArgs(model=str(folder))),
    "generation_config.json": lambda folder: gather_model_facts(EngineArgs(model=str(folder))),
    "model.safetensors": CheckpointFiles,
    "model.safetensors.index.json": CheckpointFiles,
    "tokenizer.json": Tokenizer.from_folder,
    "tokenizer_config.json": Tokenizer.from_folder,
    "chat_template.jinja": Tokenizer.from_folder,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("says", KINDS)
def test_only_regular_files_are_opened(folder, monkeypatch, name, says):
    monkeypatch.chdir(folder)
    (folder / name).unlink(missing_ok=True)
    opened = KINDS[says](folder / name)
    try:
        with pytest.raises(LoadError, match=f"{name} .*{says}"):
            READERS[name](folder)
    finally:
        if opened is not None:
            os.close(opened)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_without_end_is_not_read(folder, name):
    with (folder / name).open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(LoadError, match=f"{name} has 1099511627776 bytes, and .* at most 16777216"):
        READERS[name](folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("7", "must hold a JSON object"),
    ],
    ids=["objects", "lists", "half a character", "digits", "a number"],
)
def test_json_that_cannot_be_plain_data(tmp_path, text, says):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(LoadError, match=says):
        read_json(tmp_path / "some.json")


def test_values_that_no_message_can_carry_are_not_a_config(folder):
    (folder / "config.json").write_text('{"id2label": ' + "9" * 100 + "}")
    with pytest.raises(LoadError, match="a number of more than 64 bits"):
        gather_model_facts(EngineArgs(model=str(folder)))


def test_a_deep_index_is_one_clear_error(folder):
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match="is not a weight index"):
        CheckpointFiles(folder)


def test_a_tokenizer_without_a_vocabulary(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(LoadError, match="has an empty vocabulary"):
        Tokenizer.from_folder(folder)
