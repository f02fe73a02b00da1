"""The flags of `quire serve`: help by topics, and every flag of `vllm serve` by its name."""

import argparse
import re
from pathlib import Path

import pytest

from quire.cli import chat, complete, generate, main, serve
from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.command_line import QuireParser
from quire.config.args.foreign_flags import FOREIGN_FLAGS

LISTED = Path(__file__).with_name("vllm_serve_flags.txt").read_text().splitlines()
VLLM_FLAGS = [flag for line in LISTED if not line.startswith("#") for flag in line.split()]


def parser_of(command):
    parser = QuireParser(prog=f"quire {command.__name__.rpartition('.')[2]}")
    command.add_arguments(parser)
    return parser


SERVE = parser_of(serve)


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main.main(["serve", *words])
    assert caught.value.code == 0
    return capsys.readouterr().out


def flags_in(text):
    return [line.split()[0].rstrip(",") for line in text.splitlines() if re.match("  [-M]", line)]


@pytest.mark.parametrize("flag", VLLM_FLAGS)
def test_a_flag_of_vllm_is_taken_or_refused_by_name(flag, capsys):
    if flag in SERVE._option_string_actions:
        return
    with pytest.raises(SystemExit) as caught:
        SERVE.parse_args([flag, "1"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert f"{flag} is an option of vLLM that Quire does not have. " in err
    assert err.count("\n") == 1 and "unknown" not in err


def test_most_flags_of_vllm_have_an_option_of_the_same_name():
    taken = [flag for flag in VLLM_FLAGS if flag in SERVE._option_string_actions]
    assert len(VLLM_FLAGS) > 310 and len(taken) > 170
    aliases = {"-tp", "-pp", "-dp", "-dpl", "-dpr", "-dpn", "-q", "-ep", "-cc", "-sc", "-O", "-asc"}
    assert aliases <= set(taken)


def test_refused_flags_name_options_that_there_are():
    for instead in FOREIGN_FLAGS.values():
        for flag in re.findall(r"--[a-z][a-z-]+", instead):
            assert flag in SERVE._option_string_actions, instead


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["-dp", "3"], "data_parallel_size", 3),
        (["-q", "int8"], "quantization", "int8"),
        (["-O2"], "optimization_level", 2),
        (["-cc.mode=3"], "compilation_config", {"mode": 3}),
        (["-sc", '{"method": "ngram"}'], "speculative_config", {"method": "ngram"}),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--max-num-batched", "64"], "max_num_batched_tokens", 64),
    ],
    ids=str,
)
def test_short_forms_set_the_option(words, name, value):
    args = SERVE.parse_args(words)
    assert vars(args)[name] == value
    assert getattr(AsyncEngineArgs.from_cli_args(args), name) == value


def test_a_cut_flag_that_several_begin_with_names_them(capsys):
    with pytest.raises(SystemExit):
        SERVE.parse_args(["--max-num", "64"])
    err = capsys.readouterr().err
    assert "--max-num-seqs" in err and "--max-num-batched-tokens" in err and err.count("\n") == 1


def test_help_alone_lists_twenty_flags_and_the_groups(capsys):
    text = help_of(capsys, "--help")
    listed = flags_in(text)
    assert len(listed) == 20
    assert {"MODEL", "--port", "--max-model-len", "--max-num-seqs", "--api-key"} <= set(listed)
    for heading in ("Model:", "Serving:", "Memory and batching:", "Chat:"):
        assert heading in text.splitlines()
    assert "--help=all" in text and "Limits of one request" in " ".join(text.split())


def test_help_all_lists_everything_that_is_built(capsys):
    listed = flags_in(help_of(capsys, "--help=all"))
    shown = [a for a in SERVE._actions if a.help is not argparse.SUPPRESS and a.option_strings]
    assert len(listed) >= len(shown) > 100


@pytest.mark.parametrize("topic", ["Limits of one request", "limits_of_one_request", "LISTENING"])
def test_help_about_a_group(topic, capsys):
    text = help_of(capsys, f"--help={topic}")
    assert text.lower().startswith(topic.lower().replace("_", " ") + ":")
    assert "--dtype" not in text


@pytest.mark.parametrize(
    ("topic", "parts"),
    [
        ("max-num-seqs", ["--max-num-seqs REQUESTS"]),
        ("--max_num_seqs", ["--max-num-seqs REQUESTS"]),
        ("-q", ["--quantization, -q {fp8,"]),
        ("num-queued", ["--max-num-queued-reqs", "--max-num-queued-tokens"]),
        ("-tp", ["--tensor-parallel-size"]),
        ("enable-dbo", ["--enable-dbo is an option of vLLM that Quire does not have."]),
    ],
)
def test_help_about_a_flag(topic, parts, capsys):
    text = help_of(capsys, f"--help={topic}")
    assert all(part in text for part in parts)
    assert len(flags_in(text)) <= 2


def test_help_about_nothing_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["serve", "--help=max-model-lengths"])
    assert caught.value.code == 2
    assert "did you mean max-model-len?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [chat, complete, generate])
def test_other_commands_list_their_own_flags_first(command):
    parser = parser_of(command)
    text = parser.help_about(None)
    assert 12 < len(flags_in(text)) < 22
    assert "--max-tokens" in text and "--data-parallel-size" not in text
    assert "--data-parallel-size" in parser.help_about("all")


def test_a_file_with_a_flag_that_there_is_not_is_refused(tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text("max_model_length: 8\n")
    with pytest.raises(SystemExit):
        main.main(["serve", "--config", str(tmp_path / "serve.yaml")])
    assert "unknown option --max-model-length; did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--api-key", "a", "--api-key", "b"], ["a", "b"]),
        (["--api-key", "a", "b", "--port", "1", "--api-key=c"], ["a", "b", "c"]),
        (["--allowed-origins", "x", "--allowed-origins", "y"], None),
    ],
    ids=str,
)
def test_names_that_are_given_several_times_add_up(words, keys):
    args = SERVE.parse_args(words)
    assert args.api_key == keys
    assert keys or args.allowed_origins == ["x", "y"]
    assert SERVE.parse_args(["--api-key", "d"]).api_key == ["d"], "left from an earlier parse"


def test_names_of_the_command_line_replace_those_of_the_file(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("api-key: [a, b]\n")
    words = ["--config", str(file)]
    assert SERVE.parse_with_config(words).api_key == ["a", "b"]
    assert SERVE.parse_with_config([*words, "--api-key", "c", "--api-key", "d"]).api_key == [
        "c",
        "d",
    ]


@pytest.mark.parametrize("keys", [[""], [" "], ["good", ""], ["secret\r"], [" secret"]], ids=repr)
@pytest.mark.parametrize("is_variable", [False, True], ids=["flag", "variable"])
def test_a_key_that_no_client_can_send_is_refused(keys, is_variable, monkeypatch, capsys):
    words = ["serve", "--port", "0", "--model", "/nowhere"]
    if is_variable:
        monkeypatch.setenv("QUIRE_API_KEY", ",".join(keys))
    else:
        words += ["--api-key", *keys]
    assert main.main(words) == 2
    err = capsys.readouterr().err
    assert "API_KEY" in err if is_variable else "--api-key" in err
    assert err.count("\n") == 1 and "key" in err and "secret" not in err and "good" not in err
