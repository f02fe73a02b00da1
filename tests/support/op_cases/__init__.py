"""The cases of all ops: the conformance test runs every one, `python -m benchmarks.kernels` and
`tools/gpu_report.py` those with `is_bench`.
"""

from tests.support.op_cases import (
    coded,
    collective,
    compressed,
    edits,
    indexed,
    latent,
    logits,
    lora,
    masks,
    paged,
    products,
    prompts,
    rows,
    state,
    streams,
)
from tests.support.op_cases.case import Case, Draw, Prepared

CASES: tuple[Case, ...] = (
    *(
        *rows.CASES,
        *products.CASES,
        *paged.CASES,
        *prompts.CASES,
        *latent.CASES,
        *indexed.CASES,
        *state.CASES,
    ),
    *(*streams.CASES, *lora.CASES, *compressed.CASES),
    *(*masks.CASES, *edits.CASES, *logits.CASES, *collective.CASES),
)

FP8_CASES: tuple[Case, ...] = paged.FP8_CASES
"""KV memory in 8-bit floats, which is for providers on GPUs; `CASES` are for all."""

CODED_CASES: tuple[Case, ...] = coded.CASES
"""Products with weights that are stored as codes, which providers on GPUs widen and so round."""

__all__ = ["CASES", "CODED_CASES", "FP8_CASES", "Case", "Draw", "Prepared"]
