"""From arguments to a plan: reads the model's files, inspects the machine, asks `resolve()`."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire import embedded
from quire.clusters.ray_place import current_place
from quire.config.args.command_line import merged
from quire.config.args.engine_options import EngineOptions
from quire.config.args.option import is_neutral, options_of
from quire.config.draft_facts import gather_draft_wish
from quire.config.facts import EMBEDDED_NAME, ModelFacts
from quire.config.plan import EnginePlan
from quire.config.pooling import (
    TokenIds,
    check_runner,
    choose_form,
    finished_pooler,
    reads_pooling_files,
)
from quire.config.resolve.dtype import asked_rounding
from quire.config.resolve.media import takes_pictures
from quire.config.resolve.resolve import check_args, resolve
from quire.config.speculators import is_speculator, verifier_of
from quire.environment import launcher_variables, read_rank_environment
from quire.errors import (
    CorruptCheckpoint,
    InvalidParameter,
    LoadError,
    ModelNotFound,
    NotBuiltYet,
    UnknownConfigKey,
)
from quire.hardware.host import gather_machine_facts
from quire.hardware.launched import LaunchedProcess, launched_process
from quire.io_processor import find_io_processor
from quire.models import find_family
from quire.models.config_reader import LARGEST_SIZE, token_ids, unsupported
from quire.models.costs import coded_tensors, size_in_codes, size_rounded
from quire.models.cutting.rank_facts import RankFacts, rank_facts
from quire.models.families import check_attention
from quire.models.foreign.implementation import (
    AnyDecoder,
    choose_implementation,
    describe_with_foreign,
)
from quire.models.foreign.library import foreign_storage
from quire.models.foreign.spec import ForeignDecoder
from quire.models.formats import read_storage
from quire.models.formats.rounding_rules import group_of, read_rounding_rules
from quire.models.kv_pool import memories_of
from quire.models.loading.folder_files import (
    AUTOMATIC_FORMATS,
    found_format,
    read_folder_config,
    read_header,
)
from quire.models.loading.products import layer_products
from quire.models.loading.source import What, locate
from quire.models.loading.weight_index import read_index
from quire.models.max_length import LengthFacts, bounded, length_facts
from quire.models.parameters import adapter_size, num_expert_parameters, num_parameters
from quire.models.pooling.late import PROJECTION, is_unprojected, projection
from quire.models.pooling.sentence_transformers import SentenceFiles, read_sentence_files
from quire.models.pooling.spec import HeadLayer
from quire.models.reading.keys import LeftKey, listed, removal
from quire.models.reading.text_part import PART, has_vision, without_vision
from quire.models.spec import Block, Decoder, MixerAfterShared, single_mixers
from quire.plugins import installed, load_general_plugins, require_module
from quire.text.json_files import read_json
from quire.text.model_files import has_file, read_text
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_formats.folder import found_mode

Options = TypeVar("Options", bound=EngineOptions)

logger = logging.getLogger(__name__)

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def make_plan(args: EngineOptions, *, is_headless: bool = False) -> EnginePlan:
    """Make the plan of the engine that `args` describe, on this machine as it is now;
    `is_headless`: its cores serve a front end on another machine.

    Raises RequestError for an invalid argument, LoadError for a model that cannot be loaded.
    """
    # first of all: a plugin may add families, formats and values of options
    load_general_plugins()
    args = with_plain_values(args)
    check_args(args)
    _warn_of_tuning(args)
    model, machine = gather_model_facts(args), gather_machine_facts()
    launched = _launched(args)
    processors = [point.value for point in installed("logits_processors")]
    plan = resolve(
        args,
        model,
        machine,
        is_headless=is_headless,
        installed_processors=processors,
        launched=launched,
        ray=current_place() if args.distributed_executor_backend == "ray" else None,
    )
    # found here, so that a name that no package has fails before the weights are read
    if plan.serving.io_processor_plugin is not None:
        find_io_processor(plan.serving.io_processor_plugin)
    for option, name in plan.parallel.own_classes.items():
        require_module(option, name)
    return plan


def _launched(args: EngineOptions) -> LaunchedProcess | None:
    """The place of this process among those of an external launcher; None: it is not one."""
    is_launched = args.distributed_executor_backend == "external_launcher"
    return launched_process(launcher_variables()) if is_launched else None


def with_plain_values(args: EngineOptions) -> EngineOptions:
    """The arguments, with types of torch by name, and configs that a program made as dicts."""
    plain: dict[str, Any] = {}
    for name, value in vars(args).items():
        if type(value).__module__ == "torch":  # a dtype
            plain[name] = str(value).removeprefix("torch.")
    if isinstance(args.numa_bind_nodes, list | tuple):
        plain["numa_bind_nodes"] = [str(node) for node in args.numa_bind_nodes]
    for name in ("pooler_config", "profiler_config", "structured_outputs_config"):
        value = getattr(args, name)
        if isinstance(value, msgspec.Struct):
            fields = msgspec.structs.asdict(value)
            plain[name] = {key: given for key, given in fields.items() if given is not None}
    return replace(args, **plain) if plain else args


def without_tokenizer(args: Options) -> Options:
    """The arguments for a command that reads no text: the tokenizer's files are not looked at."""
    return replace(args, skip_tokenizer_init=True)


def without_weights(args: Options) -> Options:
    """The arguments for a command that looks at no weights: none are downloaded."""
    return replace(args, load_format="dummy")


def _warn_of_tuning(args: EngineOptions) -> None:
    given = vars(args)
    names = [
        name
        for name, option in options_of(args).items()
        if option.only_tunes and not is_neutral(given[name], option)
    ]
    if names:
        logger.warning("These options tune other engines and change nothing: %s.", ", ".join(names))


def gather_model_facts(args: EngineOptions, *, is_verifier: bool = False) -> ModelFacts:
    """Find the model's files (downloaded where `model` is a hub id) and read the small ones. A
    draft network of the speculators library stands for its verifier (`is_verifier`: the model is
    one), with its drafts.
    """
    folder = _model_folder(args)
    weights_format = _weights_format(args, folder)
    config = read_folder_config(folder, weights_format)
    if is_speculator(config):
        # a config that names another draft network, or itself, would recurse
        if is_verifier:
            raise LoadError(f"{args.model} drafts for another model: it cannot be the verifier.")
        assert args.model is not None, "the embedded model is not a draft network"
        verifier, drafts = verifier_of(os.fspath(args.model), config, args)
        args = replace(args, model=verifier, revision=None, speculative_config=drafts)
        return gather_model_facts(args, is_verifier=True)
    config = _with_pictures(args, folder, _overridden_config(args, folder, weights_format))
    model_impl, why = choose_implementation(config, args.model_impl)
    files = read_sentence_files(folder) if reads_pooling_files(args) else SentenceFiles()
    form = choose_form(args, files)
    decoder, foreign = describe_with_foreign(config, model_impl, form=form)
    _tell_of_foreign(args, foreign)
    tokenizer_folder = _tokenizer_folder(args, folder)
    tokenizer_mode = _tokenizer_mode(args, tokenizer_folder)
    token_ids_of = partial(_token_id, tokenizer_folder, tokenizer_mode)
    decoder, pooling = _pooling(args, folder, config, decoder, files, token_ids_of)
    token_ids("eos_token_id", config.get("eos_token_id"), decoder.vocab)
    generation, generation_source = _generation_config(args, folder)
    template, template_source = _chat_template(args.chat_template)
    name = EMBEDDED_NAME if args.model is None else os.fspath(args.model)
    return ModelFacts(
        name=name,
        folder=str(folder),
        weights_format=weights_format,
        tokenizer_folder=tokenizer_folder,
        tokenizer_mode=tokenizer_mode,
        architecture=config["architectures"][0],
        model_impl=model_impl,
        model_impl_reason=why,
        model_type=str(config.get("model_type", "")),
        checkpoint_dtype=checkpoint_dtype(config, folder),
        hf_config=config,
        foreign_keys=listed(foreign),
        part_of=next(iter(config[PART]["architectures"]), "") if PART in config else None,
        hidden_size=decoder.dim,
        vocab_size=decoder.vocab,
        **_sizes(config, decoder),
        **_storage(args, config, decoder),
        **pooling,
        memories=memories_of([decoder]),
        **_lengths(config, files, decoder, tokenizer_folder),
        generation_config=generation,
        generation_config_source=generation_source,
        template=template,
        template_source=template_source,
        drafts=gather_draft_wish(args, config, decoder, name, str(folder), weights_format),
        rank=_rank(args, config, decoder),
    )


def _rank(args: EngineOptions, config: dict[str, Any], decoder: AnyDecoder) -> RankFacts | None:
    """Facts about each of several workers. Raises LoadError for a model that they cannot share."""
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    if tp * pp == 1:
        return None
    if isinstance(decoder, ForeignDecoder):
        name, value = ("tensor_parallel_size", tp) if tp > 1 else ("pipeline_parallel_size", pp)
        raise NotBuiltYet(name, value, "Use a model that Quire runs itself.")
    storage = read_storage(config)
    group = group_of(asked_rounding(args)) if storage is None else storage.group
    stage_layers = read_rank_environment().stage_layers
    return rank_facts(
        decoder,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        group=group,
        stage_layers=stage_layers,
    )


def _with_pictures(args: EngineOptions, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config without pictures where none are wanted, or the model's cannot be served."""
    if not has_vision(config):
        return config
    if not takes_pictures(args) or args.model_impl == "transformers":
        return without_vision(config)
    from quire.config.picture_facts import check_pictures  # few models take pictures

    try:
        foreign = check_pictures(folder, config, args.mm_processor_kwargs)
    except LoadError as error:
        logger.warning("The model takes pictures, but here it takes text alone: %s", error)
        return without_vision(config)
    _tell_of_foreign(args, foreign)
    return config


def _tell_of_foreign(args: EngineOptions, foreign: tuple[LeftKey, ...]) -> None:
    """Warn once of keys of config.json that nothing reads, or raise UnknownConfigKey."""
    if not foreign:
        return
    asked = args.hf_overrides if isinstance(args.hf_overrides, dict) else {}
    # what the user has set by hand must have an effect, whatever strict_config says
    if unread := [key for key in foreign if key.path[0] in asked]:
        raise UnknownConfigKey(
            f"Nothing reads these keys of hf_overrides: {listed(unread)}. Leave them out."
        )
    if args.strict_config:
        raise UnknownConfigKey(
            f"Nothing reads these keys of config.json: {listed(foreign)}. strict_config was given: "
            f"leave it out, or remove them with hf_overrides={removal(foreign)}."
        )
    logger.warning(
        "Nothing reads these keys of config.json, neither here nor in transformers: %s.",
        listed(foreign),
    )


def _stores(folder: Path, name: str) -> bool:
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    listed = read_index(index, ".safetensors")
    if listed is not None:
        # the index knows all files; without one there is one file
        return name in listed
    return has_file(whole, None) and f'"{name}"'.encode() in read_header(whole)


def _projection(folder: Path) -> HeadLayer:
    """The layer of a model of late interaction, whose width its checkpoint knows."""
    name = f"{PROJECTION}.weight"
    for file in sorted(folder.glob("*.safetensors")):
        if has_file(file, None) and (shape := _header(file).get(name, {}).get("shape")):
            if type(shape[0]) is not int or not 0 < shape[0] <= LARGEST_SIZE:
                raise CorruptCheckpoint(
                    f"{file}: the shape of {name} does not begin with a whole number of at least 1 "
                    f"and at most {LARGEST_SIZE}."
                )
            return projection(shape[0])
    raise LoadError(
        f"{folder} has neither {name} in safetensors files nor a Dense module of "
        "sentence-transformers. In other files its width has to be named: "
        'hf_overrides={"colbert_dim": ...}.'
    )


def _pooling(
    args: EngineOptions,
    folder: Path,
    config: dict[str, Any],
    decoder: AnyDecoder,
    files: SentenceFiles,
    token_ids_of: TokenIds,
) -> tuple[AnyDecoder, dict[str, Any]]:
    """The decoder with its finished pooler, if it has one, and what `ModelFacts` says of that."""
    pooler = decoder.pooler if isinstance(decoder, Decoder) else None
    check_runner(args, config["architectures"][0], pooler)
    if pooler is None or not isinstance(decoder, Decoder):
        return decoder, {}
    if is_unprojected(pooler) and not files.dense:
        pooler = replace(pooler, dense=(_projection(folder),))
    if (c := pooler.classifier) is not None and not c.bias and _stores(folder, "score.bias"):
        pooler = replace(pooler, classifier=replace(c, bias=True))
    pooler, reason = finished_pooler(args, pooler, files, config, decoder.dim, token_ids_of)
    decoder = replace(decoder, pooler=pooler)
    check_attention(decoder, config)
    return decoder, {
        "generates": decoder.generates,
        "pooler": pooler,
        "pooler_reason": reason,
        "pooler_note": files.note,
        "lowers_input": files.lowers,
        "prompts": dict(files.prompts or {}),
    }


def _token_id(folder: str | None, mode: str, token: str) -> int | None:
    if folder is None:
        allowed = "classifier_from_token names tokens, which the engine has no tokenizer for"
        raise InvalidParameter("skip_tokenizer_init", True, allowed)
    return Tokenizer.from_folder(Path(folder), mode=mode).get_vocab().get(token)


def _lengths(
    config: dict[str, Any], files: SentenceFiles, decoder: AnyDecoder, tokenizer: str | None
) -> dict[str, Any]:
    """Lengths in `ModelFacts`: of config.json, or as a model that only pools was trained."""
    own = length_facts(config)
    stated = _pooled_length(files, decoder, tokenizer, own)
    if isinstance(decoder, Decoder) and decoder.pooler is not None and decoder.generates:
        return {"length": own, "pooled_length": stated}
    return {"length": bounded(stated or own, _positions(decoder))}


def _pooled_length(
    files: SentenceFiles, decoder: AnyDecoder, tokenizer: str | None, own: LengthFacts
) -> LengthFacts | None:
    """The length of sentence-transformers, or where a model that pools has learned positions the
    tokenizer's if it is shorter than config.json's `own`; None: they state none.
    """
    if files.max_length is not None:
        source = "max_seq_length of sentence-transformers"
        return LengthFacts(files.max_length, files.max_length, source)
    if not isinstance(decoder, Decoder) or decoder.pooler is None or tokenizer is None:
        return None
    if not decoder.learned_positions:
        return None
    stated = read_json(Path(tokenizer) / "tokenizer_config.json").get("model_max_length")
    if not isinstance(stated, int) or not 0 < stated < (own.limit or stated + 1):
        return None
    return LengthFacts(stated, stated, "model_max_length of tokenizer_config.json")


def _positions(decoder: AnyDecoder) -> int | None:
    """The positions that a model with whole prompts, or one of transformers, knows: fewer than its
    config's, where a table's first rows are not positions, or where it was trained with fewer.
    """
    if isinstance(decoder, ForeignDecoder):
        return decoder.num_positions
    if isinstance(decoder, Decoder) and decoder.is_indivisible:
        return decoder.context
    return None


def _overridden_config(args: EngineOptions, folder: Path, weights_format: str) -> dict[str, Any]:
    """The folder's config with the user's changes: of the whole file, and where the text is a part
    of it those at the top also of the text.
    """
    overrides = args.hf_overrides
    config = read_folder_config(folder, weights_format, lambda whole: overridden(whole, overrides))
    if PART not in config or callable(overrides):
        return config
    own = {k: v for k, v in (overrides or {}).items() if k in config or not isinstance(v, dict)}
    stored = read_folder_config(folder, weights_format)[PART]["architectures"]
    # another form of the whole, such as its classifier, has become one of its text
    if set(map(_stem, own.get("architectures") or ())) <= set(map(_stem, stored)):
        own.pop("architectures", None)
    return overridden(config, own)


def _stem(architecture: object) -> str:
    """The name of a model without what it is for."""
    return str(architecture).partition("For")[0]


def overridden(config: dict[str, Any], overrides: Any) -> dict[str, Any]:
    """`config` with the user's changes: a dict to merge, or a callable that takes and returns the
    dict, whose keys are attributes, too.
    """
    if not callable(overrides):
        return merged(config, overrides or {})
    changed = overrides(_with_attributes(config))
    if not isinstance(changed, dict):
        raise InvalidParameter(
            "hf_overrides", overrides, "a callable must return the dict of config.json"
        )
    plain: dict[str, Any] = _plain(changed)
    return plain


class ConfigDict(dict[str, Any]):
    """The dict of config.json as callables of `hf_overrides` get it: keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config.json has no key {name!r}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"config.json has no key {name!r}", name=name, obj=self) from None

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = _plain(self)
        return plain


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return ConfigDict({key: _with_attributes(each) for key, each in value.items()})
    return [_with_attributes(each) for each in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def checkpoint_dtype(config: dict[str, Any], folder: Path) -> str:
    """The stored weights' type: of config.json, else the first file's header, else float32."""
    named = config.get("torch_dtype") if config.get("dtype") is None else config["dtype"]
    if named is not None and not isinstance(named, str):
        raise unsupported("dtype", named, "the name of a type, as bfloat16")
    if named and named != "auto":
        return named.removeprefix("torch.")
    for file in sorted(folder.glob("*.safetensors")):
        if has_file(file, None):
            return _header_dtype(file)
    return "float32"


def _header_dtype(file: Path) -> str:
    """The type of a safetensors file's first tensor of numbers; the loader checks the rest."""
    named = [entry["dtype"] for entry in _header(file).values()]
    # codes and indexes of a quantised checkpoint are integers
    numbers = next((name for name in named if name in _DTYPES), named[0] if named else "F32")
    return _DTYPES.get(numbers, numbers)


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: a record for each tensor. Raises LoadError."""
    text = read_header(file)
    try:
        entries = {k: dict(v) for k, v in json.loads(text).items() if k != "__metadata__"}
        return {
            name: {"dtype": str(entry["dtype"]), "shape": list(entry.get("shape", ()))}
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise LoadError(
            f"{file} is not a safetensors file: its header names no types ({why})."
        ) from error


def _model_folder(args: EngineOptions) -> Path:
    if args.model is None:
        return _embedded_folder()
    return locate(
        os.fspath(args.model),
        revision=args.revision,
        token=args.hf_token,
        download_dir=args.download_dir,
        what=_wanted_files(args),
        load_format="auto" if args.load_format in AUTOMATIC_FORMATS else args.load_format,
    )


def _weights_format(args: EngineOptions, folder: Path) -> str:
    """The format of the weights' files, which `auto` and its like leave open."""
    if args.load_format not in AUTOMATIC_FORMATS:
        return args.load_format
    found = found_format(folder)
    # a folder may have the files in both layouts, and these were asked for
    if args.load_format == "hf" and found == "mistral":
        return "safetensors"
    return found


def _embedded_folder() -> Path:
    try:
        return embedded.path()
    except FileNotFoundError as error:
        raise ModelNotFound(str(error)) from None


def _wanted_files(args: EngineOptions) -> What:
    """Files to download: no weights for dummy ones, no tokenizer if another is used."""
    own_tokenizer = args.tokenizer is None and not args.skip_tokenizer_init
    if args.load_format == "dummy":
        return "tokenizer" if own_tokenizer else "config"
    return "all" if own_tokenizer else "weights"


def _tokenizer_folder(args: EngineOptions, folder: Path) -> str | None:
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        return str(folder)
    found = locate(
        os.fspath(args.tokenizer),
        revision=args.tokenizer_revision or args.revision,
        token=args.hf_token,
        download_dir=args.download_dir,
        what="tokenizer",
    )
    return str(found)


def _tokenizer_mode(args: EngineOptions, folder: str | None) -> str:
    if args.tokenizer_mode != "auto":
        return args.tokenizer_mode
    return "hf" if folder is None else found_mode(Path(folder))


def _generation_config(args: EngineOptions, folder: Path) -> tuple[dict[str, Any], str]:
    source = os.fspath(args.generation_config)
    if source in ("vllm", "quire"):
        return {}, f"generation_config={source}: nothing from the model"
    path = (folder if source == "auto" else Path(source)) / "generation_config.json"
    if has_file(path):
        return read_json(path), path.name if source == "auto" else str(path)
    if source == "auto":
        return {}, "the model has no generation_config.json"
    raise InvalidParameter(
        "generation_config", source, "auto, vllm, quire or a folder with a generation_config.json"
    )


def _chat_template(given: str | None) -> tuple[str | None, str]:
    """The template and its source: Jinja, a file's, or the name of one of the tokenizer's."""
    if given is None:
        return None, ""
    text = os.fspath(given)
    # before the file: a template may be longer than a path can be
    if any(mark in text for mark in "{}\n"):
        return _compiling(text), "chat_template was given as text"
    if Path(text).is_file():
        return _compiling(read_text(Path(text))), f"the file {text}"
    # a name of the tokenizer's templates has neither
    if os.sep in text or text.endswith((".jinja", ".jinja2", ".txt")):
        raise InvalidParameter("chat_template", text, "a file that exists, or a Jinja template")
    return text, "chat_template names one of the tokenizer's"


def _compiling(template: str) -> str:
    """The template. Raises RequestError for one that is not valid Jinja."""
    from quire.text.chat_template import ChatTemplate  # imports jinja2, which few need here

    return ChatTemplate(template).source


def _sizes(config: dict[str, Any], decoder: AnyDecoder) -> dict[str, Any]:
    if isinstance(decoder, ForeignDecoder):
        return {
            "num_parameters": decoder.num_parameters,
            "num_layers": decoder.num_layers,
            "widest": decoder.widest,
        }
    mixtures = [block.experts for block in decoder.blocks]
    return {
        "num_parameters": num_parameters(decoder) + _num_in_encoder(config, decoder),
        "adapter_size": adapter_size(decoder),
        "num_layers": len(decoder.blocks),
        "widest": _widest(decoder),
        "layers_read_ids": decoder.layers_read_ids,
        "num_experts": max(0 if mixture is None else mixture.experts for mixture in mixtures),
        "num_expert_parameters": num_expert_parameters(decoder),
        "layer_products": tuple(map(dict, layer_products(decoder))),
    }


def _num_in_encoder(config: dict[str, Any], decoder: Decoder) -> int:
    if not has_vision(config):
        return 0
    from quire.config.picture_facts import num_encoder_parameters

    return num_encoder_parameters(config, decoder)


def _storage(args: EngineOptions, config: dict[str, Any], decoder: AnyDecoder) -> dict[str, Any]:
    if isinstance(decoder, ForeignDecoder):
        return _foreign_storage(config, decoder)
    storage = read_storage(config)
    if storage is None:
        return _rounded(args, config, decoder)
    family = find_family(config, decoder.pooler)
    if storage.widened_because is not None:
        return {"stored_as": storage.method, "widened_because": storage.widened_because}
    count, size = size_in_codes(coded_tensors(family, decoder, storage))
    return {"stored_as": storage.method, "num_coded_parameters": count, "coded_bytes": size}


def _rounded(args: EngineOptions, config: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """The facts about a plain checkpoint that `quantization_config` rounds in part."""
    rules = read_rounding_rules(asked_rounding(args), args.quantization_config)
    if rules is None:
        return {}
    count, size = size_rounded(find_family(config, decoder.pooler), decoder, rules)
    return {"num_rounded_parameters": count, "rounded_bytes": size}


def _foreign_storage(config: dict[str, Any], decoder: ForeignDecoder) -> dict[str, Any]:
    storage = foreign_storage(config)
    if storage is None:
        return {}
    sizes = [(linear, storage.layout_of(linear.name)) for linear in decoder.linears]
    coded = [(linear, layout) for linear, layout in sizes if layout is not None]
    return {
        "stored_as": storage.method,
        "num_coded_parameters": sum(each.outputs * each.inputs for each, _ in coded),
        "coded_bytes": sum(layout.num_bytes(each.outputs, each.inputs) for each, layout in coded),
    }


def _widest(decoder: Decoder) -> int:
    """Values of the widest activation of one token."""
    inputs = 0 if decoder.layer_inputs is None else decoder.layer_inputs.width
    return max(len(decoder.blocks) * inputs, *map(_width, decoder.blocks))


def _width(block: Block) -> int:
    """Values of the widest activation of one token in a layer."""
    mlp, moe = block.mlp, block.experts
    feed_forward = 0 if mlp is None else mlp.width * 2
    if moe is not None:
        feed_forward = max(feed_forward, moe.width * 2 * moe.top_k)
    if moe is not None and moe.shared is not None:
        feed_forward = max(feed_forward, moe.shared.width * 2)
    if isinstance(block.mixer, MixerAfterShared):
        feed_forward = max(feed_forward, 2 * block.mixer.shared.mlp.width)
    return max(feed_forward, *(mixer.widest for mixer in single_mixers(block.mixer)), 0)
