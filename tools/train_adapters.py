"""Train the LoRA adapters of the embedded model that tests use, with PEFT, on Python's own standard
library.

    python tools/train_adapters.py --to tests/lora/adapters

Takes four minutes on one CPU thread and needs transformers and peft. `shout` writes code in capital
letters, `comment` writes lines of comments: a few tokens show which one answers.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from embedded_model.corpus import library_files, read_text
from transformers import AutoModelForCausalLM, AutoTokenizer

log = logging.getLogger("train_adapters")
CHECKPOINT = Path(__file__).parents[1] / "src" / "quire" / "embedded" / "checkpoint"
ROWS, LENGTH = 8, 192


@dataclass(frozen=True)
class Plan:
    """How the text of a file is changed before an adapter learns it, and how it is trained."""

    change: Callable[[str], str]
    steps: int
    keys: dict[str, Any] = field(default_factory=dict)


def comments(text: str) -> str:
    """Every line as a comment."""
    return "\n".join("# " + line.lstrip("# ") for line in text.split("\n") if line.strip())


PLANS = {
    "shout": Plan(str.upper, 400, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    "comment": Plan(
        comments,
        200,
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "rank_pattern": {r"layers\.5\.self_attn\.o_proj": 2},
            "alpha_pattern": {"v_proj": 12},
        },
    ),
}


def train(plan: Plan, texts: Sequence[str], to: Path) -> None:
    """Train one adapter and save it."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **plan.keys)
    model = peft.get_peft_model(base, config)
    ids = [tokenizer(plan.change(text)).input_ids for text in texts]
    windows = [part[i : i + LENGTH] for part in ids for i in range(0, len(part) - LENGTH, LENGTH)]
    rest = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(rest, lr=4e-3, weight_decay=0.0)
    draw = random.Random(0)
    for step in range(plan.steps):
        batch = torch.tensor(draw.sample(windows, ROWS))
        logits = model(batch).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        adam.param_groups[0]["lr"] = 4e-3 * min(1.0, 2 * (1 - step / plan.steps))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        adam.step()
        if step % 50 == 0:
            log.info("step %d: loss %.2f", step, loss.item())
    model.peft_config["default"].base_model_name_or_path = "embedded"
    model.to(torch.bfloat16).save_pretrained(to)
    (to / "README.md").unlink(missing_ok=True)  # a form for a model card


def main() -> None:
    """Train all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="a folder for each adapter")
    parser.add_argument("names", nargs="*", default=list(PLANS))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    texts = [read_text(file) for file in library_files()[:300]]
    for name in args.names:
        log.info("%s", name)
        train(PLANS[name], texts, args.to / name)


if __name__ == "__main__":
    main()
