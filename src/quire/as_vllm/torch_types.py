"""Types of torch by their names, and tensors as text, for programs that look them up in
`vllm.utils`.
"""

import base64
import io

import torch

STR_DTYPE_TO_TORCH_DTYPE = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


def tensor2base64(x: torch.Tensor) -> str:
    """A tensor as requests carry it: the base64 of what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(x, file)
    return base64.b64encode(file.getvalue()).decode("ascii")
