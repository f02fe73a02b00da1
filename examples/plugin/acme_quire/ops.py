"""A provider of one op, which is asked before Quire's own: norms as the op's definition has them,
counted.
"""

from torch import Tensor

from quire.ops.norm import NormWeight
from quire.ops.norm import norm as own
from quire.ops.registry import Facts, Implementation

calls = {"norm": 0}


def norm(x: Tensor, n: NormWeight) -> Tensor:
    """Normalise the last axis of x [*, C], as the contract in quire.ops says."""
    calls["norm"] += 1
    result: Tensor = own.definition(x, n)
    return result


def implementations(facts: Facts) -> list[Implementation]:
    """The ops that this provider has."""
    return [Implementation("norm", "acme", norm, lambda facts: True, batch_invariant=True)]
