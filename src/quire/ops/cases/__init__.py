"""The cases of all ops: the conformance test runs every one, and a benchmark those with `is_bench`.

They stand beside the contract files and not in them, so that serving a model does not load them.
"""

from quire.ops.cases import collective, edits, logits, masks, paged, products, rows
from quire.ops.cases.case import Case, Draw, Prepared

CASES: tuple[Case, ...] = (
    *(*rows.CASES, *products.CASES, *paged.CASES),
    *(*masks.CASES, *edits.CASES, *logits.CASES, *collective.CASES),
)

FP8_CASES: tuple[Case, ...] = paged.FP8_CASES
"""KV memory in 8-bit floats, which is for providers on GPUs; `CASES` are for all."""

__all__ = ["CASES", "FP8_CASES", "Case", "Draw", "Prepared"]
