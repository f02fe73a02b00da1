"""Spans in the Triton attention kernel, in Triton's interpreter, for test_triton_spans: run in a
process of its own with TRITON_INTERPRET=1; prints JSON: for each case null, or what is wrong.
"""

from __future__ import annotations

import json

import torch

from quire.ops import select
from quire.ops.mixers.spans import Span
from tests.ops.test_spans import check

STEPS = {
    "one span": ([(0, 12)], {0: [Span(2, 9)]}),
    "several, and rows without": (
        [(20, 21), (0, 12), (33, 36)],
        {1: [Span(0, 7), Span(7, 9, is_wide=True)], 2: [Span(33, 34, is_wide=True)]},
    ),
    "a span of several tiles": ([(2, 42)], {0: [Span(3, 41, is_wide=True)]}),
}
"""As in test_spans, shorter: the interpreter takes its time."""


def main():
    ops = select(device="cpu", dtype=torch.float32, providers=["triton"], deterministic=True)
    found = {}
    for name, step in STEPS.items():
        for window in (None, 3):
            try:
                check(ops, *step, window, is_invariant=True)
            except AssertionError as error:
                found[f"{name}, {window}"] = str(error)[:300]
            else:
                found[f"{name}, {window}"] = None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
