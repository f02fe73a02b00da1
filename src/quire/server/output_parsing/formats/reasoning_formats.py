"""The reasoning formats that are built in: most are a pair of delimiters."""

from __future__ import annotations

from quire.server.output_parsing.formats.parameter_formats import KIMI_K3_ANSWER, suffix_in
from quire.server.output_parsing.formats.tool_formats import COHERE_ANSWER, plamo
from quire.server.output_parsing.state_table import ReasoningFormat

K2_EFFORTS = ("think", "think_fast", "think_faster")
THINK = ("<think>",), ("</think>",)

OPTIONAL_THINK = ReasoningFormat("qwen3", *THINK)
"""Format of models that reason only where the prompt or the output has the opening delimiter."""
ASSUMED_THINK = ReasoningFormat("deepseek_r1", *THINK, is_assumed=True)
"""Format of models that always reason, and may leave out the opening delimiter."""
KIMI_K2 = ReasoningFormat(
    "kimi_k2", *THINK, is_assumed=True, ends_before=("<|tool_calls_section_begin|>",)
)
APPENDED_THINK = ReasoningFormat(
    "minimax_m2_append_think", *THINK, is_assumed=True, stays_in_answer=True
)
"""Keeps the reasoning in the answer: clients send only that back, and MiniMax M2 reads it."""
GRANITE_THINKING = ReasoningFormat("granite_thinking_parser", *THINK, trims_answer=True)
MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))
SEED_OSS = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), is_assumed=True)
GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    ends_at_calls=False,
)
ERNIE45 = ReasoningFormat(
    "ernie45", *THINK, is_assumed=True, answer_tags=("<response>\n", "\n</response>")
)
HUNYUAN_A13B = ReasoningFormat(
    "hunyuan_a13b",
    ("<think>\n",),
    ("\n</think>",),
    ends_at_calls=False,
    answer_tags=("<answer>\n", "\n</answer>"),
)
COHERE = ReasoningFormat(
    "cohere_command3",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    answer_tags=COHERE_ANSWER,
)
KIMI_K3 = ReasoningFormat(
    "kimi_k3",
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    answer_tags=KIMI_K3_ANSWER,
)
K2_HORIZON = ReasoningFormat(
    "k2_horizon",
    tuple(f"<ifm|{name}>" for name in K2_EFFORTS),
    tuple(f"</ifm|{name}>" for name in K2_EFFORTS),
    ends_before=("<ifm|tool_calls>",),
)
GEMMA4 = ReasoningFormat(
    "gemma4", ("<|channel>",), ("<channel|>",), label="thought\n", reopens=True
)
MINIMAX_M3 = ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",))
PLAMO3 = ReasoningFormat("plamo3", (plamo("begin_think"),), (plamo("end_think"),))


def hunyuan_v3(template: str = "") -> ReasoningFormat:
    """The format of a checkpoint with this chat template."""
    end = f"{suffix_in(template)}>"
    return ReasoningFormat("hy_v3", (f"<think{end}",), (f"</think{end}",), for_template=hunyuan_v3)


REASONING_FORMATS = (
    OPTIONAL_THINK, ASSUMED_THINK, APPENDED_THINK, GRANITE_THINKING, MISTRAL, SEED_OSS, GRANITE,
    ERNIE45, HUNYUAN_A13B, COHERE, KIMI_K2, KIMI_K3, K2_HORIZON, GEMMA4, MINIMAX_M3, PLAMO3,
    hunyuan_v3(),
)  # fmt: skip
