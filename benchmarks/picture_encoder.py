"""The encoder of LLaVA 1.5's pictures (CLIP-L, 336 pixels, random weights) beside transformers and
llama.cpp's mtmd, in one run: its share of the arithmetic limit, pictures per second, time to the
first token.

    python -m benchmarks.picture_encoder --dtype bfloat16 --batch 1 8 --llama-cpp ENV/bin/python

All get the same weights, threads and pixels, and the rows of a picture are compared. A first token
follows a picture that nobody has seen: decoded, processed, encoded, and 578 tokens of a decoder of
two layers. ENV has llama-cpp-python and gguf.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.bench.machine_limits import LimitProbe
from quire.bench.report import add_output_flag, at_least, finish
from quire.config.args.command_line import QuireParser
from quire.hardware.host import gather_machine_facts
from quire.hardware.placement import place
from quire.kernels.cpu.runtime import CpuRuntime
from quire.models.config_reader import read_config
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.families import read_vision
from quire.models.vision.leaves import vision_leaves
from quire.models.vision.loading import load_encoder
from quire.models.vision.pictures import Picture
from quire.models.vision.spec import VisionTower
from quire.ops import select

SIDE, PATCH, WIDTH = 336, 14, 256
"""Of a picture, of its patches, and of the decoder."""
_CLIP_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_PEER = Path(__file__).parent / "peers" / "run_mtmd.py"
_WORDS = ("<pad>", "<s>", "</s>", "<image>", *(f"w{i}" for i in range(60)))


class Timed(msgspec.Struct, frozen=True):
    """Seconds for a batch, pictures per second, and of the arithmetic limit the share."""

    program: str
    batch: int
    seconds: float
    pictures_per_s: float
    share_of_limit: float


def main(words: Sequence[str] | None = None) -> int:
    """Measure as the command line says; the exit code."""
    parser = QuireParser(prog="python -m benchmarks.picture_encoder", description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=at_least(2), default=24, help="of the encoder")
    parser.add_argument("--cpu-threads", type=int, help="default as many as an engine takes")
    parser.add_argument("--calls", type=at_least(1), default=3, help="of each batch")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--llama-cpp", type=Path, help="Python of an environment that has it")
    parser.add_argument("--llama-cpp-kinds", nargs="+", default=["bf16", "f16"], help="of matrices")
    add_output_flag(parser)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        return run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> int:
    """Measure a model in a folder of its own."""
    dtype = getattr(torch, args.dtype)
    num_threads = args.cpu_threads or place(gather_machine_facts()).num_threads
    torch.set_num_threads(num_threads)
    reference = write_model(folder, dtype, args.layers)
    runtime = CpuRuntime(num_threads=num_threads)
    ops = select(device="cpu", dtype=dtype, providers=["cpu"], runtime=runtime)
    found, _ = read_vision(read_config(folder), WIDTH)
    encoder = load_encoder(folder, found, None, ops, dtype=dtype)
    probe = LimitProbe(args.dtype, num_threads)
    limit = probe.measure()
    work = flops_of(encoder.spec)
    print(f"{limit.flops_per_s / 1e9:.0f} GFLOP/s by {limit.flops_by}, {num_threads} threads")
    rows = []

    def note(program: str, batch: int, seconds: float) -> None:
        share = batch * work / seconds / limit.flops_per_s
        rows.append(Timed(program, batch, seconds, batch / seconds, share))
        print(
            f"{program:20} {batch:2} pictures {seconds * 1e3:8.0f} ms "
            f"{batch / seconds:6.2f}/s {share:6.1%} of the limit",
            flush=True,
        )

    for batch in args.batch:
        pixels = torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        programs: dict[str, Callable[[], object]] = {"quire": of_quire(encoder, pixels)}
        if batch > 1:
            programs["quire, one by one"] = of_quire(encoder, pixels, together=False)
        if not args.skip_transformers:
            programs["transformers"] = of_transformers(reference, pixels.to(dtype))
        for name, call in programs.items():
            note(name, batch, median_seconds(call, args.calls))
    first = {"quire": first_token_of_quire(folder, args)}
    if not args.skip_transformers:
        first["transformers"] = first_token_of_transformers(reference, args.calls)
    for kind in args.llama_cpp_kinds if args.llama_cpp else ():
        answer = ask_llama_cpp(args, folder, kind, num_threads)
        for batch, seconds in answer["seconds"].items():
            note(f"llama.cpp, {kind}", int(batch), seconds)
        first[f"llama.cpp, {kind}"] = answer["first_token_s"]
        print(f"  its rows differ by {difference(encoder, folder):.2%} of the largest value")
    for name, seconds in first.items():
        print(f"{name:20} first token after {seconds * 1e3:.0f} ms")
    figures = {
        "machine": msgspec.to_builtins(limit),
        "flops_per_picture": work,
        "encoder": msgspec.to_builtins(rows),
        "first_token_s": first,
    }
    finish(figures, args.output_json)
    return 0


def write_model(folder: Path, dtype: torch.dtype, num_layers: int) -> Any:
    """Write a LLaVA with a small decoder and all its files; transformers' model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config={
            **_CLIP_L,
            "model_type": "clip_vision_model",
            "num_hidden_layers": num_layers,
            "image_size": SIDE,
            "patch_size": PATCH,
            "projection_dim": 768,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": len(_WORDS),
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        image_token_index=3,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).to(dtype).eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(_WORDS[:4]))
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            "image_mean": _MEAN,
            "image_std": _STD,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return model


def flops_of(tower: VisionTower) -> int:
    """Operations for a picture: products with every matrix, and attention."""
    patches = (SIDE // PATCH) ** 2
    tokens = patches + 1
    leaves = vision_leaves(tower)
    matrices = sum(
        leaf.size for name, leaf in leaves.items() if len(leaf.shape) > 1 and "position" not in name
    )
    return 2 * tokens * matrices + 4 * tokens**2 * tower.dim * len(tower.blocks)


def of_quire(
    encoder: VisionEncoder, pixels: torch.Tensor, *, together: bool = True
) -> Callable[[], object]:
    """Encode a batch, or its pictures one after the other."""
    pictures = [Picture(each[None]) for each in pixels]
    if together:
        return lambda: encoder.encode(pictures)
    return lambda: [encoder.encode([picture]) for picture in pictures]


def of_transformers(model: Any, pixels: torch.Tensor) -> Callable[[], object]:
    """The same rows."""

    @torch.inference_mode()
    def call() -> object:
        return model.model.get_image_features(pixel_values=pixels, return_dict=True)

    return call


def ask_llama_cpp(
    args: argparse.Namespace, folder: Path, kind: str, num_threads: int
) -> dict[str, Any]:
    """The seconds of its encoder and to its first token, in a process of its environment. It leaves
    the rows of one picture in the folder.
    """
    np.save(folder / "pixels.npy", np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3), "u1"))
    for seed in range(args.calls + 1):
        (folder / f"{seed:03}.jpeg").write_bytes(jpeg(seed))
    request = {
        "folder": str(folder),
        "kind": kind,
        "num_threads": num_threads,
        "batches": args.batch,
        "calls": args.calls,
        "around": [4, 5],
        "answer": str(folder / "answer.json"),
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    command = [args.llama_cpp, _PEER, folder / "request.json"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


def difference(encoder: VisionEncoder, folder: Path) -> float:
    """The largest of the rows that llama.cpp left, relative to the largest value. It leaves out the
    first patch, since it takes the class token for the first row, and that is its last one.
    """
    levels = torch.tensor(np.load(folder / "pixels.npy")).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
    [ours] = encoder.encode([Picture(((levels - mean) / std)[None])])
    theirs = torch.tensor(np.load(folder / "rows.npy"))
    ours, theirs = ours.float()[1:], theirs[:-1]
    return float((ours - theirs).abs().max() / ours.abs().max())


def median_seconds(call: Callable[[], object], count: int) -> float:
    """After one call that nobody times."""
    call()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def jpeg(seed: int) -> bytes:
    """A file of a picture that has the encoder's size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "JPEG")
    return file.getvalue()


def first_token_of_quire(folder: Path, args: argparse.Namespace) -> float:
    """Median seconds from a file to a token."""
    llm = LLM(model=str(folder), dtype=args.dtype, max_model_len=1024, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seeds = iter(range(1000))

    def call() -> object:
        prompt = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": jpeg(next(seeds))}}
        return llm.generate(prompt, params, use_tqdm=False)

    return median_seconds(call, args.calls)


def first_token_of_transformers(model: Any, count: int) -> float:
    """The same, with its processor for Pillow."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    ids = torch.tensor([[4, *[3] * (SIDE // PATCH) ** 2, 5]])
    seeds = iter(range(1000))

    @torch.inference_mode()
    def call() -> object:
        picture = Image.open(io.BytesIO(jpeg(next(seeds)))).convert("RGB")
        pixels = torch.tensor(np.asarray(processor(picture)["pixel_values"]))
        return model(input_ids=ids, pixel_values=pixels.to(model.dtype)).logits[0, -1].argmax()

    return median_seconds(call, count)


if __name__ == "__main__":
    sys.exit(main())
