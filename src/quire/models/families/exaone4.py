"""EXAONE 4: norms after the sub-layers only, one over each query and key head, and in models with
windows no rotation in the layers that see everything.
"""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import attention, mlp, rms, sliding_blocks, stack, window_of
from quire.models.families.olmo2 import OLMO2_RULES
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-5)
    block = Block(attention(c, qk_norm=norm), mlp(c), norm, pre=False, post=True)
    return stack(c, exaone_blocks(c, block))


def exaone_blocks(c: ConfigReader, block: Block) -> list[Block]:
    """The block of each layer: with a window, or in a model with windows without rotation."""
    window = window_of(c, 4096)
    letters = _pattern(c, window)
    assert isinstance(block.mixer, Attention), "EXAONE attends"
    rope = block.mixer.rope
    ropes = {"sliding_attention": rope, "full_attention": rope if window is None else None}
    return sliding_blocks(c, block, lambda i: letters[i % len(letters)] == "L", window, ropes)


def _pattern(c: ConfigReader, window: int | None) -> str:
    """Every n-th layer sees everything; files write n, or letters such as LLLG, which repeat."""
    written: Any = c.raw("sliding_window_pattern", 4)
    if isinstance(written, str) and written and set(written) <= {"L", "G"}:
        letters = written
    elif window is None:
        letters = "G"
    else:
        letters = "L" * (c.integer("sliding_window_pattern", 4) - 1) + "G"
    if not letters.strip("G") and window is not None:
        raise unsupported("sliding_window_pattern", written, "a pattern with sliding layers")
    return letters


FAMILY = Family(("Exaone4ForCausalLM",), _describe, OLMO2_RULES)
