"""Train an EAGLE-3 network for the embedded model, on Python's own standard library.

    python tools/train_draft_head.py --minutes 5 --to src/quire/embedded/draft_head

Everything it reads is on the machine already. The network learns the probabilities of the embedded
model in its first guess and in those that follow from its own states. Results are recorded in
docs/embedded_model.md.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import numpy as np
import torch
from embedded_model.checkpoint import load_model
from embedded_model.corpus import epoch_ids, library_files, read_documents
from embedded_model.draft import DraftHead, export_head, load_head, losses
from embedded_model.measure import held_out_windows
from embedded_model.muon import PlainMuon
from tokenizers import Tokenizer

log = logging.getLogger("train_draft_head")
EMBEDDED = Path(__file__).parents[1] / "src/quire/embedded/checkpoint"
PASSES = 3


def train(
    target_folder: Path,
    start_folder: Path | None,
    minutes: float,
    window: int,
    rows: int,
    rate: float,
) -> DraftHead:
    """Train a new network, or an exported one, for so long on windows of so many tokens. The
    learning rate follows the time, and so does the number of guesses in a row: one, and PASSES from
    60 % on.
    """
    torch.manual_seed(1)
    target = load_model(target_folder)
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    documents = read_documents(tokenizer, library_files())
    held_out = held_out_windows(tokenizer, 256)[::8]
    head = DraftHead(target)
    if start_folder is not None:
        load_head(head, start_folder)
    muon = PlainMuon(head.matrices())
    adam = torch.optim.AdamW(head.vectors(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    start, step, epoch = time.monotonic(), 0, 0 if start_folder is None else 1
    while (spent := (time.monotonic() - start) / (60 * minutes)) < 1:
        ids = epoch_ids(documents, epoch)
        windows = len(ids) // window
        order = np.random.default_rng([9, epoch]).permutation(windows)
        for cells in order[: windows // rows * rows].reshape(-1, rows):
            spent = (time.monotonic() - start) / (60 * minutes)
            if spent >= 1:
                break
            share = min(1.0, step / 50 + 0.02, 1.6 * (1.02 - spent))
            batch = np.stack([ids[c * window : (c + 1) * window] for c in cells])
            passes = PASSES if spent > 0.6 else 1
            loss, _ = losses(head, target, torch.from_numpy(batch.astype(np.int64)), passes)
            head.zero_grad()
            loss.sum().backward()
            for group in adam.param_groups:
                group["lr"] = rate * share
            adam.step()
            muon.step(rate * share)
            step += 1
            if step % 50 == 0:
                log.info("step %d, %.0f %%: %s", step, 100 * spent, loss.detach().tolist())
        epoch += 1
    with torch.no_grad():
        loss, common = losses(head, target, held_out, PASSES)
    log.info("held out: loss %s, common %s", loss.tolist(), common.tolist())
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--start", type=Path, help="an exported network to go on from")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    head = train(args.model, args.start, args.minutes, args.window, args.rows, args.rate)
    export_head(head, args.to)


if __name__ == "__main__":
    main()
