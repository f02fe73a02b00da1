"""Picks the parts of one kind out of a step's outputs."""


def of_kind(kind, outputs):
    """Those of a runner's or a core's outputs, in order."""
    return [part for part in outputs.parts if isinstance(part, kind)]
