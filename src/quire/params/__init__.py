"""The parameters of requests: sampling, beam search and pooling."""

from typing import TypeAlias

from quire.params.beam import BeamSearchParams
from quire.params.kinds import RequestOutputKind, SamplingType
from quire.params.pooling import PoolingParams
from quire.params.sampling import SamplingParams
from quire.params.structured import RepetitionDetectionParams, StructuredOutputsParams

RequestParams: TypeAlias = SamplingParams | PoolingParams
"""The parameters of one request to an engine core; the type determines its row's head."""

__all__ = [
    "BeamSearchParams",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "RequestParams",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
