"""Runs vLLM's examples of pictures on Quire, with small stand-ins for checkpoints and pictures.

    python -m tests.compat.vision_examples FOLDER

FOLDER keeps vLLM's source distribution. An example is run as it is: `import vllm` finds Quire, a
model's name a folder with random weights whose tokens have the names that the example writes, a URL
or a sample a picture that is drawn. That it ends well, and how many texts or vectors it has
printed, is what is looked at. Examples of models that Quire does not have, of sounds and of films
are left out; their number is printed.
"""

import argparse
import contextlib
import io
import re
import runpy
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import transformers

import quire.as_vllm
from quire import LLM
from quire.as_vllm import pictures
from quire.media.fetch.web import WebClient
from tests.compat.source_distribution import fetch
from tests.models.vision.spoken import picture, write_spoken
from tests.models.vision.spoken_models import END, IMAGE, SPOKEN, START
from tests.pooling.pictures import test_pairs_of_towers
from tests.pooling.pictures.test_labels import as_ranker

ARCHIVE = "vllm-0.32.0.tar.gz"
DIGEST = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
ONE = "generate/multimodal/vision_language_offline.py"
SEVERAL = "generate/multimodal/vision_language_multi_image_offline.py"
EMBED = "pooling/embed/vision_embedding_offline.py"
RANK = "pooling/score/vision_reranker_offline.py"
TOKENS = "pooling/token_embed/jina_embeddings_v4_offline.py"
MISTRAL_SMALL = "generate/multimodal/mistral-small_offline.py"

QWEN = {IMAGE: "<|image_pad|>"}
GLM = {IMAGE: "<|image|>", START: "<|begin_of_image|>", END: "<|end_of_image|>"}
MISTRAL = {IMAGE: "[IMG]"}
STAND_INS = {
    "command_a_vision": ("cohere2_vision", {IMAGE: "<|IMG_PATCH|>"}),
    "gemma3": ("gemma3", {"<|begin|>": "<start_of_image>"}),
    "gemma4": ("gemma4", {IMAGE: "<|image|>"}),
    "glm4_1v": ("glm4v", GLM),
    "glm4_5v": ("glm4v_moe", GLM),
    "glm4_5v_fp8": ("glm4v_moe", GLM),
    "idefics3": ("idefics3", {}),
    "lfm2_vl": ("lfm2_vl", {}),
    "llama4": ("llama4", {}),
    "llava": ("llava", {}),
    "llava-next": ("llava_next", {}),
    "llava-onevision": ("llava_onevision", {}),
    "mistral3": ("mistral3", MISTRAL),
    "paligemma": ("paligemma", {}),
    "paligemma2": ("paligemma2", {}),
    "pixtral_hf": ("pixtral", MISTRAL),
    "qwen2_vl": ("qwen2_vl", QWEN),
    "qwen2_5_vl": ("qwen2_5_vl", QWEN),
    "qwen3_vl": ("qwen3_vl", QWEN),
    "qwen3_vl_moe": ("qwen3_vl_moe", QWEN),
    "qwen3_5": ("qwen3_5", QWEN),
    "smolvlm": ("smolvlm", {}),
}
"""The example's name of a model: what stands in for it, and its tokens under the example's
names.
"""
VECTORS = {
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "e5_v": "llava_next",
    "qwen3_vl": "qwen3_vl",
}
"""The same of the example of vectors."""


class Example(NamedTuple):
    """A file with arguments, what stands in for its model, and what each result begins with."""

    path: str
    arguments: tuple[str, ...]
    kind: str
    names: dict[str, str]
    result: str

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return f"{Path(self.path).stem} {' '.join(self.arguments)}"


def examples(source):
    """All that can run, and the number of models of these files that Quire does not have."""
    found, left_out = [], 0
    for path, more in ((ONE, [()]), (SEVERAL, [(), ("--method", "chat")])):
        table = re.search(r"^model_example_map.*?^}", (source / path).read_text(), re.S | re.M)
        models = re.findall(r'^    "([^"]+)":', table.group(), re.M)
        left_out += len(set(models) - STAND_INS.keys())
        for model in models:
            if model in STAND_INS:
                kind, names = STAND_INS[model]
                found += [
                    Example(path, ("-m", model, *arguments), kind, names, "-" * 50)
                    for arguments in more
                ]
    for model, kind in VECTORS.items():
        names = QWEN if model == "qwen3_vl" else {}
        found.append(Example(EMBED, ("--model", model), kind, names, "mbedding output:"))
    found += [
        Example(RANK, ("-m", "jinavl_reranker"), "qwen2_vl", QWEN, "Relevance scores:"),
        Example(TOKENS, (), "qwen2_5_vl", QWEN, "torch.Size"),
        *(
            Example(MISTRAL_SMALL, (mode, "--format", "hf"), "mistral3", MISTRAL, "-" * 50)
            for mode in ("simple", "advanced")
        ),
    ]
    return found, left_out


def write_stand_in(kind, names, folder):
    if kind.endswith("Model"):
        test_pairs_of_towers.make(folder, kind)
        return
    write_spoken(kind, folder)
    shown = names.get(SPOKEN[kind].placeholder.split()[0], SPOKEN[kind].placeholder.split()[0])
    part = (
        "{% if p.type == 'text' %}{{ p.text }}{% else %}" + shown + "{% endif %}"
        "{% if p.type != 'text' %} {% endif %}"
    )
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}" + part + "{% endfor %}{% endif %} {% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for file in folder.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        for ours, theirs in names.items():
            text = text.replace(f'"{ours}"', f'"{theirs}"')
        file.write_text(text, encoding="utf-8")


def put_samples():
    """Put modules in place of vLLM's downloads."""
    image, video = types.ModuleType("vllm.assets.image"), types.ModuleType("vllm.assets.video")
    image.ImageAsset = lambda name: types.SimpleNamespace(pil_image=picture(1))
    video.VideoAsset = None
    sys.modules.update({module.__name__: module for module in (image, video)})


async def fetched(client, address, budget):
    """A picture in place of that of a URL."""
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    return file.getvalue()


def run(source, example):
    """What an example prints. Raises what it raises."""
    with tempfile.TemporaryDirectory() as folder:
        write_stand_in(example.kind, example.names, Path(folder))
        if example.path == RANK:
            as_ranker(Path(folder))
        make = LLM.__init__

        def with_stand_in(self, *args, **options):
            sizes = {"max_image_size", "size"}  # of tiles, for which the stand-ins are too small
            kwargs = options.get("mm_processor_kwargs") or {}
            short = {
                "dtype": "float32",
                "max_model_len": None,
                "tensor_parallel_size": 1,
                "ignore_patterns": ["original/**/*"],  # of files that a stand-in does not have
                "mm_processor_kwargs": {k: v for k, v in kwargs.items() if k not in sizes},
            }
            make(self, **{**options, **short, "model": folder})

        def tokenizer(*args, **options):
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder)

        out = io.StringIO()
        with (
            mock.patch.object(LLM, "__init__", with_stand_in),
            mock.patch.object(WebClient, "get", fetched),
            mock.patch.object(pictures, "fetch_image", lambda *args, **options: picture(1)),
            mock.patch.object(transformers.AutoProcessor, "from_pretrained", tokenizer),
            mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer),
            mock.patch.object(sys, "argv", [example.path, *example.arguments]),
            contextlib.redirect_stdout(out),
        ):
            runpy.run_path(str(source / example.path), run_name="__main__")
        return out.getvalue()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of the names of those to run")
    args = parser.parse_args()
    assert quire.as_vllm is not None, "from here on vllm is Quire"
    source = fetch(args.folder, "vllm", ARCHIVE, DIGEST, within="examples") / "examples"
    chosen, left_out = examples(source)
    put_samples()
    failed = 0
    for example in chosen:
        if args.only not in example.name:
            continue
        try:
            printed = run(source, example)
            num_results = printed.count(example.result) - (example.result[0] == "-")
            if not num_results:
                raise AssertionError("it printed no result")
            sys.stdout.write(f"ok      {example.name}: {num_results} results\n")
        except BaseException as error:
            failed += 1
            sys.stdout.write(f"FAILED  {example.name}: {error!r:.300}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{failed} failed; {left_out} of models that Quire does not have\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
