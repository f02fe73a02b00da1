"""A logits processor: with `SamplingParams(extra_args={"acme_token": 7})` only token 7 is left."""

import torch

from quire import AdapterLogitsProcessor, SamplingParams
from quire.runner.sampling import RequestLogitsProcessor


class OnlyToken(AdapterLogitsProcessor):
    """Leaves one token possible."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        token = (sampling_params.extra_args or {}).get("acme_token", 0)
        if not isinstance(token, int):
            raise ValueError(f"acme_token={token!r} must be the id of a token")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        token = (params.extra_args or {}).get("acme_token")
        if token is None:
            return None

        def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return only
