"""`quire generate` and `quire chat` on the embedded model, and their parts on doubles."""

import argparse
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.cli import chat, main, sampling_flags
from quire.cli.answers import Piece
from quire.cli.generate import print_stream, with_defaults
from quire.errors import PromptTooLong
from quire.params import RepetitionDetectionParams
from quire.testing import make_checkpoint

PROMPT = "def add(a, b):"
NOT_FLAGS = {
    "seed": "--seed of the engine seeds the one request",
    "stream_interval": "--stream-interval of the engine",
    "output_kind": "chosen by the command",
    "flat_logprobs": "another form of the same numbers",
    "skip_clone": "for programs that reuse the object",
    "prompt_logprob_token_ids": "one list per token of the prompt: for programs",
    "prompt_logprob_start": "goes with prompt_logprob_token_ids",
    "routed_experts_prompt_start": "needs enable_return_routed_experts",
    "trace_decode_token_ids": "needs enable_trace_replay",
    "watermarking": "not built",
    "truncate_prompt_tokens": "for programs that take prompts of any length",
}
"""Fields that have no flag, and why."""


@pytest.fixture(scope="module")
def expected():
    """What the library says: greedy, 12 tokens, and three samples."""
    with LLM(seed=5) as llm:
        greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return greedy[0].outputs[0]


def test_text_is_that_of_the_library(expected, capsys):
    assert main.main(["generate", PROMPT, "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected.text.rstrip("\n")
    assert main.main(["generate", PROMPT, "--max-tokens", "12", "--echo"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (PROMPT + expected.text).rstrip("\n")


def test_prompt_from_a_file_as_json(expected, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    words = ["generate", "--file", str(tmp_path / "prompt.txt"), "--json", "--max-tokens", "12"]
    assert main.main([*words, "--logprobs", "2", "--prompt-logprobs", "0"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (completion,) = answer["outputs"]
    assert answer["prompt"] == PROMPT
    assert completion["token_ids"] == list(expected.token_ids)
    assert completion["text"] == expected.text
    assert completion["finish_reason"] == "length"
    assert len(completion["logprobs"]) == 12
    assert completion["logprobs"][0][0]["token_id"] == expected.token_ids[0]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])


def test_several_completions_come_one_after_the_other(capsys):
    words = ["generate", PROMPT, "--n", "2", "--temperature", "1", "--max-tokens", "4"]
    assert main.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- 1 of 2", "--- 2 of 2"]


def test_a_model_of_nan_ends_with_the_reason(capsys, tmp_path):
    folder = make_checkpoint(tmp_path / "model", "tiny")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for more in ([], ["--json"], ["--n", "2", "--temperature", "1"]):
        words = ["generate", PROMPT, "--model", str(folder), "--max-model-len", "64", *more]
        assert main.main(words) == 1
        said = capsys.readouterr()
        assert "error: the model's logits are not finite (NaN or infinity)" in said.err
        if more == ["--json"]:
            (completion,) = json.loads(said.out)["outputs"]
            assert completion["error"].startswith("the model's logits are not finite")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("more", [[], ["--json"], ["--explain"]], ids=["text", "json", "plan"])
def test_an_output_that_is_full_is_named(more):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "generate", PROMPT, "--max-tokens", "2", *more],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "No space left on device: 'standard output'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the address space")
@pytest.mark.parametrize(
    ("limit", "more", "says"),
    [
        (1600 << 20, (), None),
        (1600 << 20, ("--kv-cache-memory-bytes", "1500M"), "The system refuses the memory"),
    ],
    ids=["shrinks", "given"],
)
def test_kv_memory_under_a_limit_of_the_address_space(limit, more, says):
    words = ["generate", PROMPT, "--max-tokens", "2", "--enforce-eager", *more]
    done = subprocess.run(
        [sys.executable, "-m", "quire", *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if says is None else 1), done.stderr
    assert says is None or says in done.stderr


def test_stop_text_and_other_flags_reach_the_sampler(capsys):
    words = ["generate", PROMPT, "--json", "--max-tokens", "40", "--stop", r"\n"]
    words += ["--stop", "qqq"]
    assert main.main(words) == 0
    (completion,) = json.loads(capsys.readouterr().out)["outputs"]
    assert completion["finish_reason"] == "stop"
    assert completion["stop_reason"] == "\n"
    assert "\n" not in completion["text"]


def test_explain_prints_the_plan_and_loads_nothing(capsys):
    assert main.main(["generate", "--explain", "--max-model-len", "1K"]) == 0
    out = capsys.readouterr().out
    assert "max_model_len" in out and "1024" in out and "max_model_len was given" in out


def test_every_field_of_the_parameters_is_a_flag_or_has_a_reason():
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == {*sampling_flags.FLAGS, *NOT_FLAGS}


def parse_sampling(*words):
    parser = argparse.ArgumentParser()
    sampling_flags.add_sampling_flags(parser)
    return sampling_flags.given_sampling(parser.parse_args(words))


def test_flags_become_parameters():
    assert parse_sampling() == {}
    given = parse_sampling(
        *(
            "--top-p",
            "0.5",
            "--stop",
            r"\n\n",
            "--stop",
            'say "x"',
            "--logit-bias",
            '{"5": 1.5, "6": -1}',
        ),
        *("--no-detokenize", "--allowed-token-ids", "1,2"),
        *("--repetition-detection", '{"max_pattern_size": 4, "min_count": 3}'),
    )
    assert given == {
        "top_p": 0.5,
        "stop": ["\n\n", 'say "x"'],
        "logit_bias": {5: 1.5, 6: -1},
        "detokenize": False,
        "allowed_token_ids": [1, 2],
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3),
    }


def test_flags_win_over_the_model_and_the_model_over_the_command():
    model = {"temperature": 0.6, "top_k": 20}
    assert with_defaults({"top_k": 3}, model, 9) == {
        "temperature": 0.6,
        "top_k": 3,
        "max_tokens": 9,
    }
    assert with_defaults({}, {}, 9)["temperature"] == 0.0


def pieces(*texts):
    return (SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts)


@pytest.mark.parametrize(
    ("texts", "shown"),
    [(["a", "b"], "ab\n"), (["a\n", ""], "a\n"), ([], "\n"), (["a", "\n"], "a\n")],
    ids=str,
)
def test_a_stream_ends_with_one_line_end(texts, shown, capsys):
    print_stream(pieces(*texts), "")
    assert capsys.readouterr().out == shown


class Parrot:
    def __init__(self):
        self.prompts = []
        self.fails = None

    def chat(self, messages, sampling):
        self.prompts.append(messages)
        for place, letter in enumerate(messages[-1]["content"][::-1]):
            if self.fails is not None and place == 1:
                raise self.fails
            yield Piece(letter, 1)


def say(monkeypatch, capsys, *lines, model=None, system=None):
    model = model or Parrot()
    talk = chat.Talk(model, {}, system)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert chat.converse(talk) == 0
    return talk, model, capsys.readouterr()


def test_a_talk_remembers(monkeypatch, capsys):
    talk, model, seen = say(monkeypatch, capsys, "abc", "", "de", system="Be kind.")
    assert seen.out == "cba\ned\n"
    assert [m["content"] for m in model.prompts[1]] == ["Be kind.", "abc", "cba", "de"]
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]


def test_commands_of_a_talk(monkeypatch, capsys):
    talk, model, seen = say(
        monkeypatch,
        capsys,
        *("ab", "/undo", "/undo", "cd", "/reset", "ef", "/system New one.", "gh", "/history"),
        *("/help", "/nonsense", "/quit", "never"),
        system="Old.",
    )
    talks = [[m["content"] for m in prompt] for prompt in model.prompts]
    assert talks == [["Old.", "ab"], ["Old.", "cd"], ["Old.", "ef"], ["New one.", "gh"]]
    assert "Forgotten.\nThere is nothing to forget.\n" in seen.out
    assert "[system] New one.\n[user] gh\n[assistant] hg\n" in seen.out
    assert "/reset" in seen.out and "There is no command /nonsense" in seen.out


def test_a_question_that_cannot_be_served_is_forgotten(monkeypatch, capsys):
    model = Parrot()
    model.fails = PromptTooLong(9, 8)
    talk, _, seen = say(monkeypatch, capsys, "abc", model=model)
    assert "9 tokens" in seen.err and "/reset" in seen.err
    assert talk.messages == []


def test_an_interrupted_answer_is_kept(capsys):
    model = Parrot()
    model.fails = KeyboardInterrupt()
    talk = chat.Talk(model, {}, None)
    assert talk.ask("abc").is_interrupted
    assert capsys.readouterr().out == "c\n"
    assert talk.messages[-1] == {"role": "assistant", "content": "c"}


def test_questions_that_are_not_typed_end_with_the_interrupted_one(monkeypatch, capsys):
    model = Parrot()
    model.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        say(monkeypatch, capsys, "abc", "def", model=model)
    assert capsys.readouterr().out == "c\n"


def test_chat_on_the_embedded_model(monkeypatch, capsys):
    assert main.main(["chat", "-q", "print a list", "--max-tokens", "8"]) == 0
    quick = capsys.readouterr().out
    assert quick.strip()
    monkeypatch.setattr(sys, "stdin", io.StringIO("print a list\n/quit\n"))
    assert main.main(["chat", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == quick


def test_n_has_a_short_flag(capsys):
    words = ["generate", PROMPT, "-n", "2", "--temperature", "1", "--max-tokens", "2", "--json"]
    assert main.main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 2


def test_show_gives_figures_to_programs(capsys):
    assert main.main(["show", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_parameters"] == 2_951_616
    assert figures["architecture"] == "LlamaForCausalLM"
    assert (figures["num_layers"], figures["context"]) == (6, 4096)
    assert figures["kv_bytes_per_token"] == 1536
