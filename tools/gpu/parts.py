"""The parts of a report, in the order of their value: what each is called and how long it may take.

What a part needs is imported when it runs, in its own process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpu.told import Line

FAMILIES_AT_ONCE = 5
CASES_AT_ONCE = 2
TILES_AT_ONCE = 7


@dataclass(frozen=True)
class Part:
    """A name, the most seconds it may take, and the least for which it is worth starting.

    `grace_s`: after its time a part may still end by itself, then it is killed.
    """

    name: str
    limit_s: float
    least_s: float = 15
    grace_s: float = 10


CHECKS = (
    Part("smoke", 90),
    *(
        Part(f"conformance:{dtype}:{kind}:{i}", 90)
        for dtype in ("bfloat16", "float32")
        for kind in ("fast", "fixed")
        for i in range(CASES_AT_ONCE if dtype == "bfloat16" else 1)
    ),
    *(Part(f"parity:{i}", 150) for i in range(FAMILIES_AT_ONCE)),
    *(
        Part(f"life:{name}", 150)
        for name in (
            *("features", "eager", "int4", "offload", "awq", "vectors", "both"),
            *("draft_model", "ngram", "eagle3"),
        )
    ),
    Part("bits", 150),
    Part("death", 140),
    *(Part(f"warm:{i}", 90) for i in range(TILES_AT_ONCE)),
)
"""They check answers; several run at once."""

SPEEDS = (
    Part("limits", 30),
    Part("gemv", 60),
    Part("attention", 60),
    Part("latents", 90),
    Part("large", 150),
    Part("eight", 90),
    Part("server", 120),
    Part("small", 60),
    Part("host", 60),
    Part("int4", 90),
    Part("experts", 90),
    Part("life:memory", 60),
    Part("products", 90),
    Part("kernels", 60),
    Part("tiles", 90),
    Part("latent_tiles", 120),
    Part("launches", 30),
    Part("profile", 90),
    Part("peer", 120),
)
"""They measure; one after the other."""


def lines_of(name: str, until: float) -> Iterator[Line]:
    """The lines of a part, which should end at `until` (time.monotonic)."""
    kind, *options = name.split(":")
    if kind == "smoke":
        from gpu import lives

        yield from lives.smoke()
    elif kind == "conformance":
        from gpu import correctness

        yield from correctness.conformance(options[0], options[1], int(options[2]), until)
    elif kind == "parity":
        from gpu import correctness

        yield from correctness.parity(int(options[0]), FAMILIES_AT_ONCE, until)
    elif kind in ("life", "bits", "death"):
        from gpu import lives

        yield from getattr(lives, kind)(*options)
    elif kind == "warm":
        from gpu import tuning

        yield from tuning.warm(int(options[0]), TILES_AT_ONCE)
    elif kind in ("tiles", "gemv", "launches", "profile"):
        from gpu import ceilings, tuning

        limits = [ceilings.measure()] if kind in ("tiles", "gemv") else []
        yield from getattr(tuning, kind)(*limits)
    else:
        yield from _measured(kind, until)


def _measured(kind: str, until: float) -> Iterator[Line]:
    from gpu import engines, kernels, latents, products
    from gpu.ceilings import limits, measure

    if kind == "limits":
        yield from limits()
    elif kind == "attention":
        yield from kernels.attentions(measure())
    elif kind == "kernels":
        yield from kernels.table(measure(), until)
    elif kind == "latents":
        yield from latents.table(measure())
    elif kind == "latent_tiles":
        yield from latents.tiles(measure(), until)
    elif kind == "products":
        yield from products.table(measure(), until)
    elif kind in ("host", "server"):
        yield from getattr(engines, kind)()
    elif kind == "peer":
        yield from engines.peer(until)
    else:
        yield from getattr(engines, kind)(measure())
