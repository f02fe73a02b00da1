"""What a caller can ask for: parameters of sampling, beam search and pooling."""

from quire.params.beam import BeamSearchParams
from quire.params.kinds import RequestOutputKind, SamplingType
from quire.params.pooling import PoolingParams
from quire.params.sampling import SamplingParams
from quire.params.structured import RepetitionDetectionParams, StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
