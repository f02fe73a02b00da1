"""Train the checkpoint that ships inside the package, on Python's own standard library.

    python tools/train_embedded_model.py train  --work DIR --minutes 90
    python tools/train_embedded_model.py export --work DIR --to src/quire/embedded/checkpoint
    python tools/train_embedded_model.py eval   --model src/quire/embedded/checkpoint
    python tools/train_embedded_model.py sample --model src/quire/embedded/checkpoint "def add("

Everything it reads is on the machine already: the source of the running Python. One CPU thread is
enough, and `train` can be stopped and started again. The learning rate follows the share of the
time budget that has passed, so a busy machine makes fewer steps but always ends with a fully
decayed model. Results and choices are recorded in docs/embedded_model.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

import torch
from embedded_model.checkpoint import export, load_model
from embedded_model.corpus import Batches, library_files, read_documents, read_text
from embedded_model.measure import greedy, held_out_windows, report
from embedded_model.model import Model, ModelShape, token_losses
from embedded_model.muon import Muon
from embedded_model.tokenizer import train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn

log = logging.getLogger("train_embedded_model")


def schedule(progress: float) -> float:
    """Share of the peak learning rate: 2 % warm-up, flat to 40 % of the time, then down to zero."""
    return min(1.0, progress / 0.02 + 0.02, max(0.0, (1 - progress) / 0.6))


class Trainer:
    """A training run with all its state in one folder: tokenizer.json, last.pt, log.jsonl."""

    def __init__(
        self, work: Path, shape: ModelShape, *, tokens: int, muon_rate: float, adam_rate: float
    ) -> None:
        self.work, self.shape = work, shape
        self.tokenizer = self.open_tokenizer()
        torch.manual_seed(1)
        self.model = Model(shape)
        self.documents = read_documents(self.tokenizer, library_files())
        self.batches = Batches(self.documents, tokens)
        self.held_out = held_out_windows(self.tokenizer, 512)
        self.muon, self.muon_rate, self.adam_rate = Muon(self.model), muon_rate, adam_rate
        taken = {id(p) for p in self.muon.parameters}
        rest = [p for p in self.model.parameters() if id(p) not in taken]
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.step, self.seen, self.elapsed_s = 0, 0, 0.0

    def open_tokenizer(self) -> Tokenizer:
        """Read the tokenizer of this run; the first start trains it."""
        file = self.work / "tokenizer.json"
        if not file.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            texts = (read_text(source) for source in library_files())
            train_tokenizer(texts, self.shape.vocab_size).save(str(file))
        return Tokenizer.from_file(str(file))

    def run(self, budget_s: float) -> None:
        """Train until `budget_s` seconds have been spent over all starts of this run."""
        self.resume()
        before = time.monotonic()
        while self.elapsed_s < budget_s:
            loss = self.train_step(self.elapsed_s / budget_s)
            now = time.monotonic()
            self.elapsed_s, before = self.elapsed_s + now - before, now
            if self.step % 25 == 0:
                self.note(loss=loss)
            if self.step % 200 == 0:
                self.note(held_out=self.evaluate(self.held_out[::4]))
                self.save()
        self.note(final_held_out=self.evaluate(self.held_out))
        self.save()

    def train_step(self, progress: float) -> float:
        """Learn from one batch and return its loss; `progress` is the spent share of the budget."""
        ids, targets = self.batches.take(self.step, progress)
        share = schedule(progress)
        loss = token_losses(self.model, ids, targets).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * share
        self.adam.step()
        self.muon.step(self.muon_rate * share)
        self.model.zero_grad(set_to_none=True)
        self.step, self.seen = self.step + 1, self.seen + ids.numel()
        return loss.item()

    def evaluate(self, windows: Tensor) -> float:
        """Mean loss in nats per token of windows [N, length + 1]."""
        with torch.no_grad():
            losses = [token_losses(self.model, w[:, :-1], w[:, 1:]) for w in windows.split(8)]
        return float(torch.cat(losses).mean())

    def note(self, **values: float) -> None:
        """Append a line to the log: step, tokens, seconds, epoch and the values given."""
        line = {"step": self.step, "tokens": self.seen, "epoch": self.batches.epoch}
        line |= {"seconds": round(self.elapsed_s)} | {k: round(v, 4) for k, v in values.items()}
        log.info("%s", json.dumps(line))
        with (self.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write the whole state, so that a kill at any moment loses 200 steps at most."""
        state = {
            "shape": asdict(self.shape),
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "muon": self.muon.velocities,
            "counts": (
                self.step,
                self.seen,
                self.elapsed_s,
                self.batches.epoch,
                self.batches.window,
                self.batches.cell,
            ),
        }
        torch.save(state, self.work / "last.pt.new")
        (self.work / "last.pt.new").replace(self.work / "last.pt")

    def resume(self) -> None:
        """Go on from the last saved state, if there is one."""
        if not (self.work / "last.pt").exists():
            return
        state = torch.load(self.work / "last.pt")
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.velocities, state["muon"], strict=True):
            mine.copy_(saved)
        self.step, self.seen, self.elapsed_s, epoch, window, cell = state["counts"]
        self.batches.start_epoch(epoch, window)
        self.batches.cell = cell


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, or go on training")
    train.add_argument("--work", type=Path, required=True, help="folder of the run's state")
    train.add_argument("--minutes", type=float, default=90, help="time budget over all starts")
    train.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    train.add_argument("--muon-rate", type=float, default=0.01)
    train.add_argument("--adam-rate", type=float, default=0.004)
    out = commands.add_parser("export", help="write the last saved state as a checkpoint folder")
    out.add_argument("--work", type=Path, required=True)
    out.add_argument("--to", type=Path, required=True)
    measure = commands.add_parser("eval", help="measure a checkpoint folder on the held-out files")
    measure.add_argument("--model", type=Path, required=True)
    sample = commands.add_parser("sample", help="continue a prompt greedily")
    sample.add_argument("--model", type=Path, required=True)
    sample.add_argument("--tokens", type=int, default=128)
    sample.add_argument("prompt")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if args.command == "train":
        rates = {"muon_rate": args.muon_rate, "adam_rate": args.adam_rate}
        Trainer(args.work, ModelShape(), tokens=args.tokens, **rates).run(args.minutes * 60)
    elif args.command == "export":
        state = torch.load(args.work / "last.pt")
        model = Model(ModelShape(**state["shape"]))
        model.load_state_dict(state["model"])
        export(model, Tokenizer.from_file(str(args.work / "tokenizer.json")), args.to)
    elif args.command == "eval":
        log.info("%s", json.dumps(report(args.model), indent=2))
    else:
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        log.info(
            "%s", args.prompt + greedy(load_model(args.model), tokenizer, args.prompt, args.tokens)
        )


if __name__ == "__main__":
    main()
