"""lm-eval over completions and chat completions, and its word perplexity with each tokenizer."""

import json
import os
import tempfile
from functools import cache
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

CHECKPOINT = Path(__file__).parents[3] / "src" / "quire" / "embedded" / "checkpoint"
"""The tokenizer of the embedded model, for clients that tokenize themselves."""

DOCUMENTS = [
    "def add(a, b):\n    return a + b\n",
    'class Stack:\n    """A list."""\n\n    def __init__(self):\n        self.values = []\n',
    "import os\n\nfor name in os.listdir('.'):\n    print(name)\n",
]
ROLLING = """
task: documents
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""
CHOICE = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["pass", "return None"]
doc_to_target: 0
metric_list:
  - metric: acc
"""
GENERATE = """
task: generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}}
metric_list:
  - metric: exact_match
"""


@cache
def _tasks():
    folder = Path(tempfile.mkdtemp())
    data = folder / "documents.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    for name, task in (("rolling", ROLLING), ("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(task.format(data=data))
    return TaskManager(include_path=str(folder), include_defaults=False)


def _evaluate(kind, task, url, model, **fields):
    path = "chat/completions" if "chat" in kind else "completions"
    arguments = {"model": model, "base_url": f"{url}/v1/{path}", "max_retries": 1, **fields}
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=[task], task_manager=_tasks(), bootstrap_iters=0,
        apply_chat_template="chat" in kind,
    )  # fmt: skip
    return found["results"][task]


def _perplexity(url, model, **fields):
    found = _evaluate("local-completions", "documents", url, model, **fields)
    return found["word_perplexity,none"]


LOCAL = {"tokenizer": str(CHECKPOINT), "tokenizer_backend": "huggingface"}
REMOTE = {"tokenizer_backend": "remote"}


def word_perplexity_local(url, model):
    assert _perplexity(url, model, **LOCAL) > 1


def word_perplexity_as_text(url, model):
    """Documents as text with the prefix token in them: the server must not add a second one."""
    as_ids = _perplexity(url, model, **LOCAL)
    as_text = _perplexity(url, model, tokenized_requests=False, **LOCAL)
    assert abs(as_ids - as_text) < 1e-3 * as_ids, (as_ids, as_text)


def word_perplexity_remote(url, model):
    """`/tokenizer_info`, `/tokenize` and `/detokenize`. lm-eval takes a first token whose id is 0,
    as this model's, for none and puts the end's before the text, so that the id has to be given.
    """
    local = _perplexity(url, model, **LOCAL)
    remote = _perplexity(url, model, custom_prefix_token_id=0, **REMOTE)
    assert abs(local - remote) < 1e-3 * local, (local, remote)


def word_perplexity_remote_as_text(url, model):
    local = _perplexity(url, model, **LOCAL)
    remote = _perplexity(url, model, custom_prefix_token_id=0, tokenized_requests=False, **REMOTE)
    assert abs(local - remote) < 1e-3 * local, (local, remote)


def batches(url, model):
    """Several documents in one request, and several requests at a time."""
    alone = _perplexity(url, model, **LOCAL)
    together = _perplexity(url, model, batch_size=3, num_concurrent=2, **LOCAL)
    assert abs(alone - together) < 1e-3 * alone, (alone, together)


def multiple_choice(url, model):
    found = _evaluate("local-completions", "choices", url, model, **LOCAL)
    assert 0 <= found["acc,none"] <= 1


def generation(url, model):
    assert _evaluate("local-completions", "generated", url, model, **LOCAL)


def chat_generation(url, model):
    assert _evaluate("local-chat-completions", "generated", url, model)
