"""The reasoning formats that are built in: most are a pair of delimiters."""

from __future__ import annotations

from quire.server.output_parsing.formats.harmony import HARMONY_REASONING
from quire.server.output_parsing.state_table import ReasoningFormat

THINK = ("<think>",), ("</think>",)

OPTIONAL_THINK = ReasoningFormat("qwen3", *THINK)
"""For models that can do without: the prompt or the output says so with the opening delimiter."""
ASSUMED_THINK = ReasoningFormat("deepseek_r1", *THINK, is_assumed=True)
"""For models that always reason, and may leave out the opening delimiter."""
MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))
SEED_OSS = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), is_assumed=True)
GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    ends_at_calls=False,
)

REASONING_FORMATS = (
    OPTIONAL_THINK, ASSUMED_THINK, MISTRAL, SEED_OSS, GRANITE, HARMONY_REASONING,
)  # fmt: skip
ALIASES = {
    "deepseek_v3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "mimo": "qwen3",
    "nemotron_v3": "qwen3",
    "kimi_k2": "deepseek_r1",
    "minimax_m2": "deepseek_r1",
    "olmo3": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}
"""Names of the same formats."""
