"""Pooling of hidden states, as a value: the `pooler` of a `Decoder` spec.

The order for a vector is: pool, cast to the head's dtype, `dense` layers, cut to the dimensions
asked for, normalise; for labels: pool, cast, the classifier's layers (before pooling where it is
late) and product, its mean and deviation, its activation. Tasks of tokens do the same with every
token's hidden state in place of a pooled one. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import InvalidParameter

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""The names of `quire.params.pooling.TASKS`."""
SequencePooling = Literal["cls", "mean", "last", "max", "mean_sqrt", "weightedmean"]
"""A prompt's vector: its first token's hidden state, the mean, its last token's, of each
number the largest, the sum divided by the root of the length, the mean in which token i counts i
times.
"""
TokenPooling = Literal["all", "step"]
HeadActivation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Comparison of two vectors; of the latter two it is the negative distance."""
LabelActivation = Literal["identity", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """norm(act(W @ x + b)) with `width` results; `bias` where it has one.

    `norm_eps`: the norm is a layer norm with a weight, and with `norm_bias` a bias; None: there is
    no norm. `file`: the path, within the model's folder, of the file that holds it (a Dense module
    of sentence-transformers); None: it is in the checkpoint, as a module of the name `module`.
    """

    width: int
    act: HeadActivation = "tanh"
    bias: bool = True
    norm_eps: float | None = None
    norm_bias: bool = False
    file: str | None = None
    module: str = "linear"


@dataclass(frozen=True, slots=True)
class Classifier:
    """activation(((W @ x + b) - `mean`) / `deviation`) of x = the last of `layers`, with a result
    for each of `num_labels` labels.

    `labels` are their names, None for one without. `token_ids`: rows of W are those of the
    language-model head (the input embedding where that is tied) for these tokens, or with
    `is_difference` the second token's minus the first's, in fp32. `is_late`: `layers` are of each
    token, before these are pooled.
    """

    num_labels: int
    activation: LabelActivation
    bias: bool = False
    layers: tuple[HeadLayer, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0
    labels: tuple[str | None, ...] = ()
    token_ids: tuple[int, ...] = ()
    is_difference: bool = False
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class TermWeights:
    """A weight for each of `size` tokens of the vocabulary (SPLADE, Formal et al. 2021): of what
    the language-model head scores at each token of a prompt, log(1 + relu(score)), the largest, or
    with `pooling` "sum" the sum.

    `layers` are between hidden states and the head, which is the input embedding, with a `bias`.
    `is_damped`: the logarithm of one more is taken twice. `ends`: the ids of a first and of a last
    token that do not count.
    """

    size: int
    layers: tuple[HeadLayer, ...]
    bias: bool = True
    pooling: Literal["max", "sum"] = "max"
    is_damped: bool = False
    ends: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """The prompt of a query and a document that a model was trained with: `document` stands before
    the latter, then `query` before the former, and `last_ids` are its last tokens.
    """

    document: str
    query: str
    last_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """A pooling head.

    `tasks` are those that it can do, the one that is served by default first. `pooling` makes one
    vector of a prompt, and the vectors of `more_poolings` follow it. `step_tag`: with token
    pooling "step", the token id whose hidden states are kept. `returned_ids`: the columns that are
    kept then, () for all. `activates`: whether vectors are normalised, and labels activated, where
    a request does not say. `dense` is of vectors only, the `classifier` of labels only. `sizes`:
    to how many numbers a vector may be cut; () for any, None where it may not. `is_wide`: the head
    computes in fp32, not in the model's dtype. `encodes_pairs`: a pair of texts is read as the
    tokenizer encodes pairs, not as one text after the other. `pair`: their prompt, where they have
    one of their own. `token_types`: how many types the
    model's tokens have, 0 where they have none. `similarity`: the score of two vectors. `terms`:
    vectors are of these weights, and nothing else is pooled. `also_generates`: the model has its
    language-model head, too.
    """

    tasks: tuple[PoolingTask, ...]
    pooling: SequencePooling = "last"
    more_poolings: tuple[SequencePooling, ...] = ()
    token_pooling: TokenPooling = "all"
    step_tag: int | None = None
    returned_ids: tuple[int, ...] = ()
    activates: bool = True
    dense: tuple[HeadLayer, ...] = ()
    classifier: Classifier | None = None
    sizes: tuple[int, ...] | None = None
    dimensions: int | None = None
    is_wide: bool = True
    encodes_pairs: bool = True
    pair: PairPrompt | None = None
    token_types: int = 0
    similarity: Similarity = "cosine"
    terms: TermWeights | None = None
    also_generates: bool = False

    @property
    def poolings(self) -> tuple[SequencePooling, ...]:
        """All, in the order of their vectors."""
        return (self.pooling, *self.more_poolings)

    @property
    def tells_texts_apart(self) -> bool:
        """Whether tokens of a second text have a type of their own."""
        return self.token_types >= 2

    @property
    def reads_tokens(self) -> bool:
        """Whether something is scored with rows of the language-model head."""
        c = self.classifier
        return self.terms is not None or (c is not None and bool(c.token_ids))

    def width(self, dim: int) -> int:
        """Numbers of a whole vector, of hidden states with `dim`."""
        if self.terms is not None:
            return self.terms.size
        return self.dense[-1].width if self.dense else dim * len(self.poolings)


def check_dimensions(pooler: PoolerSpec, dimensions: int, width: int, name: str) -> None:
    """Raise InvalidParameter unless vectors of `width` numbers may be cut to so many."""
    if pooler.sizes is None and dimensions == width:
        return  # nothing is cut
    if pooler.sizes is None:
        allowed = (
            f"{name} does not support Matryoshka embeddings, so that dimensions must be left out"
        )
        hint = 'hf_overrides={"is_matryoshka": true} says that it does.'
        raise InvalidParameter("dimensions", dimensions, allowed, hint)
    if not 1 <= dimensions <= width:
        raise InvalidParameter("dimensions", dimensions, f"vectors have from 1 to {width} numbers")
    if pooler.sizes and dimensions not in pooler.sizes:
        allowed = f"the sizes are {', '.join(map(str, pooler.sizes))}"
        raise InvalidParameter("dimensions", dimensions, allowed)
