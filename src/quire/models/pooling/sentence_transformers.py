"""The files with which sentence-transformers describes a model: which modules follow the
transformer, and how its input is prepared. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.pooling.spec import HeadActivation, HeadLayer, SequencePooling, Similarity
from quire.text.json_files import read_json, read_value
from quire.text.model_files import has_file

_PACKAGES = (
    "sentence_transformers.models.",
    "sentence_transformers.sentence_transformer.modules.",
    "sentence_transformers.base.modules.",
    "sentence_transformers.sparse_encoder.models.",
    "sentence_transformers.sparse_encoder.modules.",
    "sentence_transformers.multi_vector_encoder.modules.",
    "pylate.models.",
)
_POOLINGS: dict[str, SequencePooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
"""The names of poolings -> ours."""
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys that older files have in place of names, in the order of their vectors."""
_ACTIVATIONS: dict[str, HeadActivation] = {
    "linear.Identity": "identity",
    "activation.Tanh": "tanh",
    "activation.ReLU": "relu",
    "activation.GELU": "gelu",
    "activation.SiLU": "silu",
    "activation.Sigmoid": "sigmoid",
}
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ABOUT = "config_sentence_transformers.json"
_LATE_NOTE = (
    "Every token of a text counts when token vectors are compared: prompts are not put before "
    "texts, queries are not expanded, and no tokens are left out."
)
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of a Dense module's weights; the first that is there counts."""


_PLACES = {
    "Transformer": 0,
    "MLMTransformer": 0,
    "Pooling": 1,
    "SpladePooling": 1,
    "Dense": 2,
    "MultiVectorMask": 3,
    "Normalize": 4,
}
"""Modules -> their place in a list, which has one for each at most, and any number of Dense."""
_POOLED = "sentence_embedding"
"""Output that modules after Pooling read and write."""


@dataclass(frozen=True, slots=True)
class TermPooling:
    """The way of a SpladePooling module from scores to weights: fields of `TermWeights`."""

    pooling: Literal["max", "sum"]
    is_damped: bool


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """Contents of the files.

    `poolings` (): they name none; the vectors of several follow each other. `normalizes` None:
    there is no list of modules. `dense_inputs`: the width that each of the `dense` layers reads.
    `max_length` None: the model's own. `lowers`: input is in small
    letters. `prompts`, by name, are for callers to put before their texts. `similarity` None: they
    do not say how vectors are compared. `terms`: vectors are sparse, of the vocabulary's tokens.
    `has_token_vectors`: each token has a vector, which are compared (ColBERT).
    """

    poolings: tuple[SequencePooling, ...] = ()
    has_pooling: bool = False
    normalizes: bool | None = None
    dense: tuple[HeadLayer, ...] = ()
    dense_inputs: tuple[int, ...] = ()
    max_length: int | None = None
    lowers: bool = False
    prompts: Mapping[str, str] | None = None
    similarity: Similarity | None = None
    terms: TermPooling | None = None
    has_token_vectors: bool = False
    note: str = ""


def read_sentence_files(folder: Path) -> SentenceFiles:
    """Read them from a model's folder. Raises LoadError for files that cannot be what they are
    called, and for Dense modules that cannot be used.
    """
    modules = _modules(folder)
    length, lowers = _transformer(folder)
    about = read_json(folder / _ABOUT)
    prompts, similarity = about.get("prompts"), _similarity(about.get("similarity_fn_name"))
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        prompts = {}
    if modules is None:
        return SentenceFiles(
            max_length=length, lowers=lowers, prompts=prompts, similarity=similarity
        )
    paths = {name: [path for kind, path in modules if kind == name] for name, _ in modules}
    poolings: tuple[SequencePooling, ...] = ()
    if "Pooling" in paths:
        poolings = _poolings(folder, paths["Pooling"][0])
    terms = None
    if "SpladePooling" in paths:
        if "Pooling" in paths or "Dense" in paths:
            raise LoadError(f"{folder}/modules.json: SpladePooling has neither Pooling nor Dense.")
        terms = _terms(folder / paths["SpladePooling"][0] / "config.json")
    has_token_vectors = "Pooling" not in paths and ("Dense" in paths or "MultiVectorMask" in paths)
    if not has_token_vectors:
        _check_names(folder, [*paths.get("Dense", ()), *paths.get("Normalize", ())])
    dense = [_dense(folder, path) for path in paths.get("Dense", ())]
    return SentenceFiles(
        poolings=poolings,
        has_pooling="Pooling" in paths or terms is not None or has_token_vectors,
        normalizes=None if has_token_vectors else "Normalize" in paths,
        dense=tuple(layer for layer, _ in dense),
        dense_inputs=tuple(inputs for _, inputs in dense),
        max_length=length,
        lowers=lowers,
        prompts=prompts,
        similarity=similarity,
        terms=terms,
        has_token_vectors=has_token_vectors,
        note=_LATE_NOTE if has_token_vectors else "",
    )


def _similarity(name: Any) -> Similarity | None:
    """Comparison of vectors, by its name in the files."""
    if name is None or (isinstance(name, str) and name.lower() == "maxsim"):
        return None  # as token vectors always are
    allowed: tuple[Similarity, ...] = get_args(Similarity)
    for known in allowed:
        if name == known:
            return known
    raise unsupported("similarity_fn_name", name, ", ".join(allowed), _ABOUT)


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """Type and folder of each module; None where there is no list of them."""
    path = folder / "modules.json"
    if not has_file(path):
        return None
    listed = read_value(path)
    try:
        found = [(str(module["type"]), str(module.get("path", ""))) for module in listed]
    except (TypeError, KeyError, AttributeError):
        raise LoadError(f"{path} must be a list of modules with a type and a path.") from None
    for _, inside in found:
        parts = PurePosixPath(inside).parts
        # a model's own file must not lead out of its folder
        if ".." in parts or PurePosixPath(inside).is_absolute() or "\0" in inside:
            raise LoadError(f"{path}: {inside!r} is not a folder of the model.")
    modules = [(_type(path, kind), inside) for kind, inside in found]
    _check_order(path, [name for name, _ in modules])
    return modules


def _check_order(path: Path, names: Sequence[str]) -> None:
    """Raise LoadError for an order in which the same modules compute something else."""
    for before, after in pairwise(names):
        if _PLACES[before] > _PLACES[after] or (
            _PLACES[before] == _PLACES[after] and after != "Dense"
        ):
            raise LoadError(
                f"{path}: {after} after {before} is not implemented; the order is Transformer, "
                "Pooling, Dense (any number of them), Normalize."
            )


def _type(path: Path, kind: str) -> str:
    """The name of a module's class. Raises LoadError for one that is not implemented."""
    name = kind.rpartition(".")[2]
    if kind.startswith(_PACKAGES) and name in _PLACES:
        return name
    raise LoadError(
        f"{path}: modules of type {kind[:200]} are not implemented; there are "
        f"{', '.join(_PLACES)} of sentence-transformers."
    )


def _poolings(folder: Path, inside: str) -> tuple[SequencePooling, ...]:
    """The poolings of a module, the mean where it names none. Raises UnsupportedConfigValue."""
    file = f"{inside}/config.json"
    config = read_json(folder / file)
    if config.get("include_prompt") not in (None, True):
        raise unsupported("include_prompt", config["include_prompt"], "true", file)
    given = config.get("pooling_mode")
    names = [given] if isinstance(given, str) else given
    if names is None:
        names = [name for key, name in _SWITCHES.items() if config.get(key)] or ["mean"]
    if not isinstance(names, list) or not names or not set(map(str, names)) <= _POOLINGS.keys():
        raise unsupported("pooling_mode", given, ", ".join(_POOLINGS), file)
    return tuple(_POOLINGS[name] for name in names)


def _terms(path: Path) -> TermPooling:
    c = ConfigReader(read_json(path), f"{path.parent.name}/config.json: ")
    c.ignore("embedding_dimension", "word_embedding_dimension", "chunk_size")
    pooling = c.choice_of("pooling_strategy", "max", "sum", absent="max")
    is_damped = c.choice("activation_function", {"relu": False, "log1p_relu": True}, "relu")
    c.finish()
    return TermPooling(pooling, is_damped)


def _check_names(folder: Path, modules: Sequence[str]) -> None:
    """Raise UnsupportedConfigValue unless each module reads and writes the pooled vector."""
    for inside in modules:
        config = read_json(folder / inside / "config.json")
        for key in ("module_input_name", "module_output_name"):
            if config.get(key) not in (None, _POOLED):
                raise unsupported(key, config[key], _POOLED, f"{inside}/config.json")


def _dense(folder: Path, inside: str) -> tuple[HeadLayer, int]:
    """The layer of a Dense module, and the width that it reads. Raises LoadError for others."""
    path = folder / inside / "config.json"
    c = ConfigReader(read_json(path), f"{inside}/config.json: ")
    c.ignore("module_input_name", "module_output_name", "init_weight", "init_bias")
    inputs = c.integer("in_features")
    # Tanh is what a Dense module has that names none
    given = c.raw("activation_function", "torch.nn.modules.activation.Tanh")
    name = given.removeprefix("torch.nn.modules.") if isinstance(given, str) else ""
    if name not in _ACTIVATIONS:
        raise unsupported("activation_function", given, ", ".join(_ACTIVATIONS), str(path))
    if c.flag("use_residual", False):
        raise unsupported("use_residual", True, "false", str(path))
    files = [f"{inside}/{name}" for name in WEIGHT_FILES if has_file(folder / inside / name, None)]
    if not files:
        raise LoadError(f"{folder / inside} has no weights in {' or '.join(WEIGHT_FILES)}.")
    layer = HeadLayer(
        c.integer("out_features"), _ACTIVATIONS[name], c.flag("bias", True), file=files[0]
    )
    c.finish()
    return layer, inputs


def _transformer(folder: Path) -> tuple[int | None, bool]:
    """The longest input, and whether it is lower-cased, which counts only with a length."""
    for name in _TRANSFORMER_FILES:
        c = read_json(folder / name)
        length = c.get("max_seq_length")
        if length is None:
            continue
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise unsupported("max_seq_length", length, "a number of tokens", name)
        lowers = c.get("do_lower_case", False)
        if not isinstance(lowers, bool):
            raise unsupported("do_lower_case", lowers, "true or false", name)
        return length, lowers
    return None, False
