"""What a caller can ask for: parameters of sampling, beam search and pooling."""

from typing import TypeAlias

from quire.params.beam import BeamSearchParams
from quire.params.kinds import RequestOutputKind, SamplingType
from quire.params.pooling import PoolingParams
from quire.params.sampling import SamplingParams
from quire.params.structured import RepetitionDetectionParams, StructuredOutputsParams

RequestParams: TypeAlias = SamplingParams | PoolingParams
"""What one request to an engine core asks for; the type says which head its row has."""

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
