"""Has transformers read a checkpoint that `quire quantize` wrote: compares its logits with the
engine's on the same checkpoint, and with those of the checkpoint that it was made from. Needs the
package compressed-tensors; run as

    PYTHONPATH=src:. python tools/read_quantized.py SOURCE QUANTISED
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.models.paged_driver import PagedRun, relative_error

_LENGTH = 48


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("quantised", type=Path)
    args = parser.parse_args()
    spec = read_spec(read_config(args.quantised))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(spec.vocab, (_LENGTH,), generator=generator)
    theirs, plain = (_of_transformers(at, prompt) for at in (args.quantised, args.source))
    ops = select(device="cpu", dtype=torch.float32)
    model = load_model(args.quantised, spec, ops, dtype=torch.float32, max_model_len=2 * _LENGTH)
    [ours] = PagedRun(model, [prompt], ops=ops).step([_LENGTH]).values()
    figures = {
        "engine_to_transformers": float(relative_error([ours], [theirs])),
        "transformers_to_source": float(relative_error([theirs], [plain])),
        "same_first_choice": float((ours.argmax(1) == theirs.argmax(1)).float().mean()),
    }
    print(json.dumps(figures))


def _of_transformers(folder: Path, prompt: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(prompt[None]).logits[0]
    return logits


if __name__ == "__main__":
    main()
