"""Runs vLLM's examples of pictures over HTTP against `quire serve`, with small stand-ins.

    python -m tests.compat.online_vision_examples FOLDER

FOLDER keeps vLLM's source distribution. A server is started with the flags that the example names,
for a folder with random weights; the example is run as it is but for the port. A URL of a picture
is a picture that is drawn, in both processes. That it ends well and what it has printed is looked
at: a number of results, and errors for films alone, which Quire does not take.
"""

import argparse
import base64
import contextlib
import io
import itertools
import json
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import requests
import torch
import transformers
from safetensors.torch import load_file, save_file

import quire.as_vllm
from quire.as_vllm import pictures
from quire.cli.main import main as quire_main
from quire.media.fetch.web import WebClient
from tests.compat.source_distribution import fetch
from tests.compat.vision_examples import (
    ARCHIVE,
    DIGEST,
    GLM,
    MISTRAL,
    QWEN,
    fetched,
    picture,
    write_stand_in,
)
from tests.pooling.pictures.test_labels import as_ranker
from tests.pooling.pictures.test_retrievers import as_published

CHAT = "generate/multimodal/openai_chat_completion_client_for_multimodal.py"
EMBED = "pooling/embed/vision_embedding_online.py"
CLASSIFY = "pooling/classify/vision_classification_online.py"
SCORE = "pooling/score/vision_score_api_online.py"
RERANK = "pooling/score/vision_rerank_api_online.py"
COLQWEN = "pooling/score/colqwen3_rerank_online.py"
TOKENS = "pooling/token_embed/colqwen3_token_embed_online.py"
EMBEDS = "features/prompt_embed/prompt_embed_inference_with_openai_client.py"
POOLING = ("--runner", "pooling")
RERANKER = {
    "architectures": ["Qwen3VLForSequenceClassification"],
    "classifier_from_token": ["w1", "w2"],  # "no" and "yes" there
    "is_original_qwen3_reranker": True,
}
RETRIEVER = ("--served-model-name", "TomoroAI/tomoro-colqwen3-embed-4b")
CLASSIFIER = {"architectures": ["Qwen2_5_VLForSequenceClassification"]}


class Example(NamedTuple):
    """A file, its arguments, what stands in for its model and the tokens of that under the
    example's names, the server's flags, and how many results the pattern `result` finds.
    `of_films`: how many of its requests are refused.
    """

    path: str
    arguments: tuple[str, ...]
    kind: str
    names: dict[str, str]
    flags: tuple[str, ...]
    result: str
    count: int
    of_films: int = 0

    @property
    def name(self):
        """What it is called in the table."""
        return f"{Path(self.path).stem} {' '.join(self.arguments)} ({self.kind})"


def chats(kind, names):
    """The chats of the three types for a model."""
    return [
        Example(CHAT, ("-c", each, "-n", "8"), kind, names, (), "Chat completion output", count)
        for each, count in (("text-only", 1), ("single-image", 2), ("multi-image", 1))
    ]


EXAMPLES = [
    *chats("llava", {}),
    *chats("qwen2_vl", QWEN),
    *chats("qwen3_vl", QWEN),
    *chats("gemma3", {"<|begin|>": "<start_of_image>"}),
    *chats("smolvlm", {}),
    *chats("pixtral", MISTRAL),
    *chats("glm_ocr", GLM),
    Example(EMBED, ("--model", "clip"), "CLIPModel", {}, POOLING, "embedding output:", 2),
    Example(EMBED, ("--model", "siglip"), "SiglipModel", {}, POOLING, "embedding output:", 2),
    Example(EMBED, ("--model", "qwen3_vl"), "qwen3_vl", QWEN, POOLING, "embedding output:", 3),
    Example(
        *(EMBED, ("--model", "dse_qwen2_vl"), "qwen2_vl", QWEN),
        (*POOLING, "--chat-template", "pooling/embed/template/dse_qwen2_vl.jinja"),
        *("embedding output:", 2),
    ),
    Example(
        *(CLASSIFY, (), "qwen2_5_vl", QWEN),
        (*POOLING, "--hf-overrides", json.dumps(CLASSIFIER)),
        *("'probs'", 3, 1),
    ),
    *(
        Example(
            *(path, (), "qwen3_vl", QWEN),
            *((*POOLING, "--hf-overrides", json.dumps(RERANKER)), result, count, 1),
        )
        for path, result, count in ((SCORE, "'object': 'score'", 13), (RERANK, "'relevance_s", 9))
    ),
    *(
        Example(path, (), "qwen2_vl", QWEN, POOLING, result, count, 1)
        for path, result, count in ((SCORE, "'object': 'score'", 13), (RERANK, "'relevance_s", 9))
    ),
    Example(COLQWEN, (), "qwen3_vl", QWEN, RETRIEVER, r"score=|    \[", 14),
    Example(TOKENS, (), "qwen3_vl", QWEN, RETRIEVER, r"  (?:Query \d|Doc \d| Doc \d)[ :]", 9),
    Example(EMBEDS, (), "llava", {}, ("--enable-prompt-embeds",), "Completions API", 2),
]


def serve(folder, port, flags):
    """The server, whose pictures of URLs are drawn."""
    with mock.patch.object(WebClient, "get", fetched):
        return quire_main(["serve", folder, "--port", port, "--dtype", "float32", *flags])


@contextlib.contextmanager
def server(folder, flags, log):
    """The port of a server in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", __spec__.name, "--serve", folder, str(port), *flags]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise AssertionError("the server has ended")
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                    break
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def drawn(url, **options):
    """The reply of a host to a request for a picture."""
    if "localhost" in url or "127.0.0.1" in url:
        return GET(url, **options)
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    reply = requests.Response()
    reply.status_code, reply._content = 200, file.getvalue()
    return reply


GET = requests.get


def run(source, example, folder, port):
    """What an example prints. Raises what it raises."""
    text = (source / example.path).read_text(encoding="utf-8")
    text = re.sub(r"\b8000\b", str(port), text)
    script = folder / "example.py"
    script.write_text(text, encoding="utf-8")

    def tokenizer(*args, **options):
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def model(*args, **options):
        return transformers.AutoModelForImageTextToText.from_pretrained(folder)

    out = io.StringIO()
    with (
        mock.patch.object(requests, "get", drawn),
        mock.patch.object(pictures, "fetch_image", lambda *args, **options: picture(1)),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer),
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", model),
        mock.patch.object(sys, "argv", [example.path, *example.arguments]),
        contextlib.redirect_stdout(out),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def add_classifier(folder):
    """A head of classes in the weights."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    torch.manual_seed(0)
    width = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight")).shape[1]
    save_file(tensors | {"score.weight": torch.randn(2, width)}, file, {"format": "pt"})


@contextlib.contextmanager
def stand_in(source, example, log):
    """A folder, and the port of a server for it."""
    with tempfile.TemporaryDirectory() as name:
        write_stand_in(example.kind, example.names, Path(name))
        if example.path == CLASSIFY:
            add_classifier(Path(name))
        if example.path in (SCORE, RERANK) and example.kind == "qwen2_vl":
            as_ranker(Path(name))
        if example.flags == RETRIEVER:
            as_published("ColQwen3", Path(name))
        flags = [str(source / flag) if flag.endswith(".jinja") else flag for flag in example.flags]
        with server(name, flags, log) as port:
            yield Path(name), port


def tried(source, example, folder, port):
    """Run one. Raises AssertionError where it does not print what it should."""
    printed = run(source, example, folder, port)
    errors = len(re.findall(r"'error'", printed))
    found = len(re.findall(example.result, printed))
    if (found, errors) != (example.count, example.of_films):
        raise AssertionError(f"{found} results, {errors} errors: {printed[-1500:]}")
    return found


def told(source, example, folder, port):
    """Run one and print how it went; whether it went well."""
    try:
        found = tried(source, example, folder, port)
        sys.stdout.write(f"ok      {example.name}: {found} results\n")
    except Exception as error:
        sys.stdout.write(f"FAILED  {example.name}: {error!r:.1800}\n")
        return False
    finally:
        sys.stdout.flush()
    return True


def main():
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:4], sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of the names of those to run")
    args = parser.parse_args()
    assert quire.as_vllm is not None, "from here on vllm is Quire"
    source = fetch(args.folder, "vllm", ARCHIVE, DIGEST, within="examples") / "examples"
    quick = types.ModuleType("pybase64")  # does the same, faster
    quick.b64encode, quick.b64decode = base64.b64encode, base64.b64decode
    sys.modules["pybase64"] = quick
    failed = 0
    with (args.folder / "servers.log").open("w", encoding="utf-8") as log:
        chosen = [example for example in EXAMPLES if args.only in example.name]
        for _, group in itertools.groupby(chosen, lambda e: (e.path, e.kind, e.flags)):
            examples = list(group)
            try:
                with stand_in(source, examples[0], log) as (model, port):
                    failed += sum(not told(source, each, model, port) for each in examples)
            except AssertionError as error:
                failed += len(examples)
                sys.stdout.write(f"FAILED  {examples[0].name}: {error}\n")
    sys.stdout.write(f"{failed} failed\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
