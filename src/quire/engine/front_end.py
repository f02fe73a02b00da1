"""The parts of an engine on the caller's side of the core, put together from a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.plan import EnginePlan
from quire.engine.client import EngineCoreClient
from quire.engine.input_processor import InputProcessor, ModelLimits
from quire.engine.output_processor import OutputProcessor
from quire.models import read_spec
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class FrontEnd:
    """What an `LLMEngine` works with: the core's client and the two processors on this side of it.

    `sampling_defaults` are the fields of SamplingParams that the model's files set; `model_name` is
    for metrics; `chat_template` overrides the tokenizer's.
    """

    client: EngineCoreClient
    tokenizer: Tokenizer | None
    inputs: InputProcessor
    outputs: OutputProcessor
    model_name: str
    log_stats: bool = False
    chat_template: str | None = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


def build_front_end(plan: EnginePlan, client: EngineCoreClient) -> FrontEnd:
    """Load the plan's tokenizer and put it in front of `client`, which runs the plan's core.

    Raises LoadError for tokenizer files that cannot be used.
    """
    tokenizer = None
    if plan.tokenizer_folder is not None:
        tokenizer = Tokenizer.from_folder(Path(plan.tokenizer_folder), mode=plan.tokenizer_mode)
    limits = ModelLimits(
        vocab_size=read_spec(plan.hf_config).vocab,
        max_model_len=plan.max_model_len,
        max_logprobs=plan.max_logprobs,
        eos_token_ids=plan.generation_eos_token_ids,
    )
    return FrontEnd(
        client=client,
        tokenizer=tokenizer,
        inputs=InputProcessor(tokenizer, limits, seed=plan.seed),
        outputs=OutputProcessor(
            tokenizer, stream_interval=plan.stream_interval, log_stats=plan.log_stats
        ),
        model_name=plan.served_model_names[0],
        log_stats=plan.log_stats,
        chat_template=plan.chat_template,
        sampling_defaults=dict(plan.sampling_defaults),
    )
