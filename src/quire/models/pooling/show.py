"""A pooler as text, in the form of the program that it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.models.pooling.spec import HeadLayer, PoolerSpec, SequencePooling, TermWeights

_POOLED: dict[SequencePooling, str] = {
    "cls": "x[first token]",
    "mean": "mean of x",
    "last": "x[last token]",
    "max": "largest of x",
    "mean_sqrt": "sum of x / sqrt(tokens)",
    "weightedmean": "mean of x, of which the i-th counts i times",
}


def pooler_lines(p: PoolerSpec, dim: int) -> Iterator[str]:
    """Lines about the way of hidden states x with `dim` numbers."""
    if p.terms is not None:
        yield from _term_lines(p.terms, dim, " / |p|" if p.activates else "")
        return
    if p.classifier is not None and p.classifier.is_late:
        yield "p = x    # of each token"
        yield from _layers(p.classifier.layers, dim)
        yield "x = p"
    yield f"p = {', '.join(map(_POOLED.__getitem__, p.poolings))}    # for tasks of tokens each x"
    yield from _layers(p.dense, dim * len(p.poolings))
    c = p.classifier
    if c is None:
        length = " / |p|" if p.activates else ""
        yield f"vector[{p.width(dim)}] = p{length}"
        return
    yield from () if c.is_late else _layers(c.layers, dim)
    inputs = c.layers[-1].width if c.layers else dim
    scores = f"classifier[{c.num_labels} x {inputs}] @ p{' + bias' if c.bias else ''}"
    if c.mean or c.deviation != 1:
        scores = f"({scores} - {c.mean:g}) / {c.deviation:g}"
    is_plain = c.activation == "identity" or not p.activates
    yield f"labels = {scores}" if is_plain else f"labels = {c.activation}({scores})"


def _term_lines(terms: TermWeights, dim: int, length: str) -> Iterator[str]:
    yield "p = x    # of each token"
    yield from _layers(terms.layers, dim)
    product = f"head[{terms.size} x {dim}] @ p{' + bias' if terms.bias else ''}"
    weight = f"log(1 + relu({product}))"
    yield f"p = {f'log(1 + {weight})' if terms.is_damped else weight}"
    yield f"vector[{terms.size}] = {terms.pooling} of p{length}"


def _layers(layers: Sequence[HeadLayer], inputs: int) -> Iterator[str]:
    for layer in layers:
        product = f"W[{layer.width} x {inputs}] @ p{' + bias' if layer.bias else ''}"
        after = product if layer.act == "identity" else f"{layer.act}({product})"
        yield f"p = {after}" if layer.norm_eps is None else f"p = norm({after})"
        inputs = layer.width
