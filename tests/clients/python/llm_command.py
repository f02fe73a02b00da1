"""`llm`, the command: a model of `extra-openai-models.yaml`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.scenarios import PERSON, PROMPT, SYSTEM, TOO_LONG, check_person

MODELS = """
- model_id: quire
  model_name: {model}
  api_base: "{url}/v1"
  supports_schema: true
  supports_tools: true
- model_id: quire-text
  model_name: {model}
  api_base: "{url}/v1"
  completion: true
"""
TOOL = """
def get_weather(city: str) -> str:
    "The weather in a city."
    return "Sunny"
"""


def _llm(url, model, *arguments, fails=False):
    folder = Path(tempfile.mkdtemp())
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=url, model=model))
    done = subprocess.run(
        [Path(sys.executable).with_name("llm"), *arguments],
        env=os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"},
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stderr[-1500:]
    return done.stderr if fails else done.stdout


def chat(url, model):
    """Streamed, which is the default, and whole."""
    assert _llm(url, model, "-m", "quire", "-s", SYSTEM, PROMPT).strip()
    assert _llm(url, model, "-m", "quire", "--no-stream", "-u", PROMPT).strip()


def options(url, model):
    arguments = []
    for name, value in {
        "temperature": 0.5, "max_tokens": 20, "top_p": 0.9, "frequency_penalty": 0.1,
        "presence_penalty": 0.1, "stop": "zzz", "seed": 3, "logit_bias": '{"5": -100}',
    }.items():  # fmt: skip
        arguments += ["-o", name, str(value)]
    assert _llm(url, model, "-m", "quire", *arguments, PROMPT).strip()


def json_object(url, model):
    _llm(url, model, "-m", "quire", "-o", "json_object", "1", "-o", "max_tokens", "30", PROMPT)


def schema(url, model):
    for stream in ("--no-stream", None):
        arguments = ["-m", "quire", "--schema", json.dumps(PERSON), *filter(None, [stream]), PROMPT]
        check_person(json.loads(_llm(url, model, *arguments)))


def tools(url, model):
    """`auto`; the chain of calls is limited."""
    for stream in ("--no-stream", None):
        arguments = ["-m", "quire", "--functions", TOOL, "--chain-limit", "5",
                     *filter(None, [stream]), PROMPT]  # fmt: skip
        _llm(url, model, *arguments)


def completion(url, model):
    """`completion: true` asks for completions, with log-probabilities."""
    assert _llm(url, model, "-m", "quire-text", "-o", "max_tokens", "12", PROMPT)
    assert _llm(
        url, model, "-m", "quire-text", "-o", "max_tokens", "12", "-o", "logprobs", "2", PROMPT
    )


def overflow(url, model):
    """An error of one line with the message."""
    assert "maximum context length" in _llm(url, model, "-m", "quire", TOO_LONG, fails=True)
