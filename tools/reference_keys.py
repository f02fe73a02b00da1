"""Write the table of the config keys that transformers reads, for each type of model.

    PYTHONPATH=src python tools/reference_keys.py          # write the table
    PYTHONPATH=src python tools/reference_keys.py --check  # compare it with the installed version

A key is read where the configuration class declares it, or where its code or the modelling files of
its package mention it: these are parsed, not run. A default is that of the class, or the one that
the reading code gives; null stands for one that the code computes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from quire.models.vision.families import TOWERS, WHOLES

TABLE = Path(__file__).parent.parent / "src/quire/models/reading/reference_keys.json"
_MODELS = Path(transformers.__file__).parent / "models"
_SHARED_CODE = ("masking_utils.py", "cache_utils.py")
"""Read the configurations of all decoders."""
_ENCODERS = ("MODEL_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
_ENCODING = ("t5", "mt5", "umt5")
"""Types of models with decoders, whose encoders run by themselves."""
_ENDS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
"""Of whole models that generate, encode or classify."""
_SUB_CONFIGS = ("text_config", "thinker_config", "llm_config")
_CODE_OF_CLASSES = (PreTrainedConfig, object)
"""Ancestors whose keys all classes share, and that are not listed for each."""


def made_table() -> dict[str, Any]:
    """The table: of each type its architectures, or the type of its text part; and its keys."""
    models = {kind: entry_of(kind) for kind in sorted(_kinds())}
    texts = {kind: text for kind in sorted(CONFIG_MAPPING_NAMES) if (text := _text_kind(kind))}
    wholes = [kind for kind in sorted(WHOLES) if kind in CONFIG_MAPPING_NAMES]
    return {
        "transformers": transformers.__version__,
        "shared": _shared(),
        "ropes": _ropes(),
        "text_parts": texts,
        "tower_kinds": {kind: tower for kind in wholes if (tower := _tower_kind(kind))},
        "towers": {
            kind: entry_of(kind)
            for kind in sorted(TOWERS.keys() - WHOLES.keys())
            if kind in CONFIG_MAPPING_NAMES
        },
        "wholes": {kind: entry_of(kind) for kind in wholes},
        "models": models,
    }


def _kinds() -> set[str]:
    """Types that generate text or encode it, and those of the text parts of others."""
    found = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found |= {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *_ENCODING}
    with_pictures = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    found |= {kind for kind, name in with_pictures.items() if name.endswith("ForCausalLM")}
    found |= {text for kind in CONFIG_MAPPING_NAMES if (text := _text_kind(kind))}
    return {kind for kind in found & set(CONFIG_MAPPING_NAMES) if not _text_kind(kind)}


def _text_kind(kind: str) -> str | None:
    """The type of the text part of a model that has several parts."""
    found = CONFIG_MAPPING[kind]
    for key in _SUB_CONFIGS:
        if (spec := found.sub_configs_defaults.get(key)) is not None:
            inner = spec.model_type
            return (_text_kind(inner) or inner) if inner in CONFIG_MAPPING_NAMES else None
    return None


def _tower_kind(kind: str) -> str | None:
    """The type of the vision encoder in a model of several parts."""
    spec = CONFIG_MAPPING[kind].sub_configs_defaults.get("vision_config")
    return None if spec is None else spec.model_type


def entry_of(kind: str) -> dict[str, Any]:
    """The architectures of a type, the other names of its keys, and its keys."""
    found = CONFIG_MAPPING[kind]
    keys = _declared(found) | {}
    for key, default in (*_in_class(found), *_in_models(found)):
        keys.setdefault(key, default)
    keys.update(_of_parts(found))
    for alias, target in found.attribute_map.items():
        keys.setdefault(alias, keys.get(target))
    if "rope_parameters" in keys:
        theta = keys.get("rope_theta") or found.default_theta  # some have one for each layer type
        keys["rope_theta"] = theta if isinstance(theta, int | float) else None
        keys.setdefault("partial_rotary_factor", None)
        keys.setdefault("rope_scaling", None)
    entry: dict[str, Any] = {"architectures": _architectures(kind, found)}
    if aliases := dict(sorted(found.attribute_map.items())):
        entry["aliases"] = aliases
    shared = _shared()
    own = {k: v for k, v in keys.items() if k not in shared or shared[k] != v}
    return {**entry, "keys": dict(sorted(own.items()))}


def _of_parts(found: type) -> dict[str, Any]:
    """The keys of objects within a configuration, which are classes of their own."""
    parts = {key: spec.config_class for key, spec in found.sub_configs_defaults.items()}
    return {
        f"{part}.{key}": default
        for part, cls in parts.items()
        if part in ("attn_config", "ffn_config")
        for key, default in _declared(cls).items()
    }


@cache
def _ropes() -> dict[str, list[str]]:
    """The keys of a rotation that its type reads."""
    found = {}
    for kind, function in ROPE_INIT_FUNCTIONS.items():
        tree = ast.parse(inspect.getsource(function))
        found[kind] = sorted({key.removeprefix("rope.") for key, _ in _of_rope(tree)})
    return found


def _of_rope(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Keys of rotations that code reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            on, args = node.func.value, node.args
            if node.func.attr not in _TAKING:
                continue
        elif isinstance(node, ast.Subscript):
            on, args = node.value, [node.slice]
        else:
            continue
        if ast.unparse(on).endswith(_ROPE_NAMES):
            found = ((f"rope.{key}", default) for key, default in _constant(args))
            yield from ((key, d) for key, d in found if key not in ("rope.rope_type", "rope.type"))


_ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_parameters_dict", "rope_params")


def _architectures(kind: str, found: type) -> list[str]:
    """The classes of its modelling files that take this configuration and are whole models."""
    named = {
        getattr(modeling_auto, table).get(kind)
        for table in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", *_ENCODERS)
    }
    flat = {name for entry in named for name in (entry if isinstance(entry, tuple) else [entry])}
    for cls in _classes(found):
        if _configs_of(cls) == {found.__name__} and cls.name.endswith(_ENDS):
            flat.add(cls.name)
    own = {cls.name for cls in _classes(found)}  # several types may share another's classes
    return sorted(name for name in flat & own if not name.endswith("PreTrainedModel"))


def _declared(found: type) -> dict[str, Any]:
    """The fields of a class and their defaults."""
    base = {field.name for field in fields(PreTrainedConfig)}
    return {
        field.name: _plain(field.default_factory())  # type: ignore[misc]
        if field.default_factory is not MISSING
        else _plain(field.default)
        for field in fields(found)
        if field.name not in base or _plain(field.default) is not None
    }


@cache
def _shared() -> dict[str, Any]:
    """The keys of all classes."""
    keys = {field.name: _plain(field.default) for field in fields(PreTrainedConfig)}
    for name in _SHARED_CODE:
        tree = ast.parse((_MODELS.parent / name).read_text())
        for key, default in _mentioned(tree):
            keys.setdefault(key, default)
    return dict(sorted(keys.items()))


def _plain(value: Any) -> Any:
    """A default as JSON has it; null for what JSON cannot say."""
    if value is MISSING:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def _in_class(found: type) -> Iterator[tuple[str, Any]]:
    """Keys that the code of a configuration class takes, and its ancestors' but for the root."""
    for cls in found.__mro__:
        if cls in _CODE_OF_CLASSES or not cls.__module__.startswith("transformers.models."):
            continue
        tree = ast.parse(inspect.getsource(cls))
        yield from _mentioned(tree, "self")
        yield from _of_rope(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                on, name = node.func.value, node.func.attr
                if isinstance(on, ast.Name) and on.id == "kwargs" and name in _TAKING and node.args:
                    yield from _constant(node.args)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "kwargs":
                yield from _constant([node.slice])


_TAKING = ("pop", "get", "setdefault")


def _constant(args: list[ast.expr]) -> Iterator[tuple[str, Any]]:
    """A key and its default from the arguments of a call."""
    if isinstance(args[0], ast.Constant) and isinstance(args[0].value, str):
        default = args[1].value if args[1:] and isinstance(args[1], ast.Constant) else None
        yield args[0].value, _plain(default)


def _in_models(found: type) -> Iterator[tuple[str, Any]]:
    """Keys that the classes and functions of the modelling files read of this configuration."""
    for node in _classes(found):
        configs = _configs_of(node)
        if not configs or found.__name__ in configs:
            yield from _mentioned(node)
            yield from _of_rope(node)


@cache
def _classes(found: type) -> list[ast.ClassDef | ast.FunctionDef]:
    """What the modelling files of its package define at top level."""
    package = Path(inspect.getfile(found)).parent
    trees = [ast.parse(file.read_text()) for file in sorted(package.glob("modeling_*.py"))]
    nodes = [node for tree in trees for node in tree.body]
    return [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def _configs_of(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """The names of configuration classes by which its arguments are annotated."""
    functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
    made = [f for f in functions if f.name == "__init__"] or functions
    notes = [a.annotation for f in made for a in (*f.args.args, *f.args.kwonlyargs)]
    text = " ".join(ast.unparse(note) for note in notes if note is not None)
    words = set(text.replace("'", " ").replace("|", " ").replace('"', " ").split())
    if isinstance(node, ast.ClassDef):
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "config":
                words.add(ast.unparse(line.annotation))
    return {word for word in words if word.endswith("Config") and word != "PreTrainedConfig"}


def _mentioned(tree: ast.AST, name: str | None = None) -> Iterator[tuple[str, Any]]:
    """Attributes of configurations that code reads, but for initial weights and methods; `name`: of
    this name alone, assigned ones included.
    """
    calls = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in _without_initialisation(tree):
        if isinstance(node, ast.Attribute) and id(node) not in calls:
            is_read = name is not None or isinstance(node.ctx, ast.Load)
            if is_read and _is_config(node.value, name) and node.attr not in _NOT_KEYS:
                yield node.attr, None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_reading = node.func.id in ("getattr", "hasattr") and len(node.args) > 1
            if is_reading and _is_config(node.args[0], name):
                yield from _constant(node.args[1:])


_NOT_KEYS = frozenset(dir(PreTrainedConfig)) - {field.name for field in fields(PreTrainedConfig)}
"""Attributes of all classes that are no entries of a file."""


def _without_initialisation(tree: ast.AST) -> Iterable[ast.AST]:
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        inner = ast.iter_child_nodes(node)
        stack += [n for n in inner if getattr(n, "name", None) != "_init_weights"]


def _is_config(node: ast.expr, name: str | None) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name if name else node.id.endswith("config")
    return name is None and isinstance(node, ast.Attribute) and node.attr.endswith("config")


def text_of(table: dict[str, Any]) -> str:
    """The table as it is stored: one line for each type."""
    parts = []
    for name, entries in table.items():
        value = json.dumps(entries)
        if name in _BY_TYPE:
            lines = [f"{json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in entries.items()]
            value = "{\n" + ",\n".join(lines) + "\n}"
        parts.append(f"{json.dumps(name)}: {value}")
    return "{\n" + ",\n".join(parts) + "}\n"


_BY_TYPE = ("towers", "wholes", "models")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and do not write")
    args = parser.parse_args()
    text = text_of(made_table())
    if args.check:
        is_same = TABLE.read_text(encoding="utf-8") == text
        print("up to date" if is_same else f"{TABLE} differs: run tools/reference_keys.py")
        return not is_same
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
