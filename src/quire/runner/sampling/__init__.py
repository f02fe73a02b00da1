"""From logits to token ids: the sampler, its parts, and custom logits processors."""

from quire.runner.sampling.batch_update import Member
from quire.runner.sampling.columns import SampledLogprobs, SampledTokens
from quire.runner.sampling.loading import find_logits_processors, make_logits_processors
from quire.runner.sampling.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
    process_dict_updates,
)
from quire.runner.sampling.part import LogitsPart, TokenHistory
from quire.runner.sampling.sampler import Drafts, DrawInputs, Sampler, SamplerOutput

__all__ = [
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "Drafts",
    "DrawInputs",
    "LogitsPart",
    "LogitsProcessor",
    "SampledLogprobs",
    "Member",
    "MoveDirectionality",
    "RequestLogitsProcessor",
    "Sampler",
    "SampledTokens",
    "SamplerOutput",
    "TokenHistory",
    "find_logits_processors",
    "make_logits_processors",
    "process_dict_updates",
]
