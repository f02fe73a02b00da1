"""Published config.json files are read as they are, and give in small what transformers makes of
them. `python -m tests.models.published_files.run` tries all of them.
"""

import json

import pytest

from quire.errors import LoadError
from quire.models.families import read_spec
from quire.models.reading.floats import decoded
from quire.models.reading.text_part import text_part
from tests.models.published_files.comparing import outcome_of
from tests.models.published_files.files import published_files
from tests.models.published_files.run import RESULTS

SHARP = (
    "Qwen3-Coder-30B-A3B-Instruct",  # foreign keys
    "DeepSeek-R1-0528-Qwen3-8B",  # a key of vLLM's
    "Phi-4-mini-instruct",  # code of its own, longrope
    "gemma-4-E2B",  # a part, a config for each layer
    "Qwen3.5-9B",
    "Kimi-K2.5",  # a whole that transformers calls otherwise
    "Devstral-Small-2-24B",
    "Qwen/Qwen3-VL-2B-Instruct",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Hy-MT2-7B",
)
FILES = published_files()
KNOWN = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SHARP)
def test_a_published_file_in_small_is_what_transformers_makes_of_it(name, tmp_path):
    assert outcome_of(FILES[name], tmp_path).kind == "equal"


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_read_or_refused_as_recorded(name):
    try:
        read_spec(text_part(decoded(FILES[name])))
    except LoadError as error:
        assert KNOWN[name]["kind"] == "refused", error
    else:
        assert KNOWN[name]["kind"] in ("equal", "starts")


def test_there_are_enough_of_them():
    assert len(FILES) >= 150 and KNOWN.keys() == FILES.keys()
