"""Starts `quire serve` as llama.cpp's tests start llama-server, by the table of docs/moving.md.

What has no counterpart ends with a sentence and status 3.
"""

import json
import os
import sys
from pathlib import Path

STAND_INS = {
    "ggml-org/test-model-stories260K": "causal",
    "bert-bge-small/ggml-model-f16.gguf": "minilm",
    "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": "cross",
}
WITHOUT_EFFECT = {
    "--offline": 0, "--cont-batching": 0, "--kv-unified": 0, "--no-slots": 0, "--embedding": 0,
    "--reranking": 0, "--metrics": 0, "--jinja": 0, "--no-jinja": 0, "--hf-repo": 1, "--hf-file": 1,
    "--batch-size": 1, "--ubatch-size": 1, "-fa": 1, "--no-ui": 0, "--reasoning-format": 1,
}  # fmt: skip
"""Flags whose meaning Quire has anyway, and how many values they have."""
SAME = {
    "--port": "--port", "--host": "--host", "--seed": "--seed", "--alias": "--served-model-name",
    "--api-key": "--api-key", "--chat-template-file": "--chat-template",
    "--parallel": "--max-num-seqs", "--threads": "--cpu-threads",
}  # fmt: skip
ANY_NAME = (
    *("test", "gpt-4.1", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "davinci-002"),
    *("text-embedding-3-small", "codellama70b"),
)
"""What the tests call the model: llama-server takes any name."""
GENERATION = {"--temp": ("temperature", float), "--n-predict": ("max_new_tokens", int)}
POOLING = ("mean", "cls", "last")


def stand_in(words):
    """The name of the checkpoint for the model that the words name. Raises SystemExit."""
    given = dict(zip(words, [*words[1:], ""], strict=True))
    named = [given[flag] for flag in ("--hf-repo", "--hf-file") if flag in given]
    found = next((STAND_INS[name] for name in named if name in STAND_INS), None)
    if found is None:
        refuse(f"no stand-in for the model {' '.join(named)}")
    return found


def refuse(why):
    print(f"NOT SERVED {why}", file=sys.stderr, flush=True)
    raise SystemExit(3)


def translated(words, checkpoints):
    """The words of `quire` for those of llama-server."""
    model = stand_in(words)
    done, generation, context, slots = ["serve", str(checkpoints / model)], {}, None, 1
    waiting = list(words)
    while waiting:
        flag = waiting.pop(0)
        if flag in WITHOUT_EFFECT:
            del waiting[: WITHOUT_EFFECT[flag]]
            continue
        value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else ""
        if flag in SAME:
            values = value.split(",") if flag in ("--alias", "--api-key") else [value]
            done += [SAME[flag], *values, *(ANY_NAME if flag == "--alias" else ())]
        elif flag in GENERATION:
            name, kind = GENERATION[flag]
            generation[name] = kind(value)
        elif flag == "--ctx-size":
            context = int(value)
        elif flag == "--pooling" and value in POOLING:
            done += ["--pooler-config", json.dumps({"seq_pooling_type": value.upper()})]
        else:
            refuse(f"{flag} {value}".strip())
        slots = int(value) if flag == "--parallel" else slots
    if context is not None:
        done += ["--max-model-len", str(context // slots)]
    if model == "causal":
        done += ["--override-generation-config", json.dumps(generation)]
    return done


if __name__ == "__main__":
    folder = Path(os.environ["STAND_INS"])
    words = translated(sys.argv[1:], folder)
    os.execv(sys.executable, [sys.executable, "-m", "quire", *words])
