"""The server's options: their checks, the file of `--config`, the reference page."""

import argparse
from pathlib import Path

import pytest
from reference_page import render_server

from quire.cli import serve
from quire.config.args.command_line import QuireParser
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import options_of
from quire.config.args.server_args import ServerArgs
from quire.errors import InvalidParameter

DOCS = Path(__file__).parents[2] / "docs"


def parse(*words):
    parser = QuireParser()
    serve.add_arguments(parser)
    return parser.parse_with_config(list(words))


def test_the_reference_page_is_up_to_date():
    assert (DOCS / "server_args.md").read_text() == render_server(), (
        "run PYTHONPATH=src python tools/reference_page.py docs/server_args.md"
    )


def test_every_option_is_a_flag_of_serve():
    given = vars(parse("some/model", "--port", "0", "--max-model-len", "1k"))
    assert given["model_tag"] == "some/model"
    assert (given["port"], given["max_model_len"]) == (0, 1000)
    assert set(options_of(ServerArgs)) <= set(given)
    assert set(options_of(EngineArgs)) <= set(given)


def test_a_file_says_what_the_command_line_would(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: file/model\nport: 1\nmax-model-len: 1k\nenable_access_log: true\n"
        "enable-prefix-caching: false\ndisable-log-stats: false\nuds: null\n"
        "api-key: [a, b]\noverride-generation-config: {top_k: 3}\n"
    )
    given = parse("--config", str(file), "--port", "2")
    assert (given.model, given.port, given.max_model_len) == ("file/model", 2, 1000)
    assert given.enable_access_log is True and given.enable_prefix_caching is False
    assert given.disable_log_stats is False and given.uds is None
    assert given.api_key == ["a", "b"]
    assert given.override_generation_config == {"top_k": 3}
    merged = parse("--config", str(file), "--override-generation-config.top_p", "0.5")
    assert merged.override_generation_config == {"top_k": 3, "top_p": 0.5}


def test_a_device_is_not_a_file_of_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--config", "/dev/null")  # reading /dev/zero would not end
    assert ended.value.code == 2
    assert "/dev/null is a device, where a file is expected." in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- a\n", "a: b: c\n", "no_such_flag: 1\n", "port: many\n"])
def test_a_file_that_says_something_else_is_wrong_usage(tmp_path, text, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        parse("--config", str(file))
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("fields", [
    {"port": 70000}, {"max_body_bytes": 1}, {"ssl_cert_reqs": 5}, {"api_server_count": 0},
    {"fingerprint_mode": "some"}, {"header_timeout_s": 0},
])  # fmt: skip
def test_values_are_checked(fields):
    with pytest.raises(InvalidParameter):
        ServerArgs(**fields).validate()


def test_keys_and_origins_may_be_one_or_many():
    assert ServerArgs(api_key="a").keys == ("a",)
    assert ServerArgs(api_key=["a", "b"]).keys == ("a", "b")
    assert ServerArgs().keys == ()
    assert ServerArgs(allowed_origins="x").origins == ["x"]


def test_flags_survive_a_round_trip():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert ServerArgs.from_cli_args(parser.parse_args([])) == ServerArgs()
