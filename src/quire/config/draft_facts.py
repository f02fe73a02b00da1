"""Facts about the weights that draft, read from their files, and the method that they are for."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from quire.config.args.engine_options import EngineOptions
from quire.config.speculative_config import (
    REFUSED_METHODS,
    SpeculativeConfig,
    check_keys,
    speculative_config,
)
from quire.config.speculators import proposed_tokens
from quire.errors import NotBuiltYet
from quire.models.foreign.spec import ForeignDecoder
from quire.models.layer_memory import LayerMemory
from quire.models.loading.folder_files import found_format, read_folder_config
from quire.models.loading.source import locate
from quire.models.parameters import num_parameters
from quire.models.spec import Decoder

_WITHOUT_FILES = ("ngram", "suffix", "auto", "custom_class", "extract_hidden_states")
_TAKEN_AT_THEIR_WORD = (*_WITHOUT_FILES, "eagle", "eagle3")
"""Methods that are not looked for in a draft's name and config."""

_NUM_PREDICTED = ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers")


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A draft's checkpoint: `method` is what it is for, `hf_config` its config.json.
    `num_predicted`: how many tokens it was trained to draft, None if its config does not say.
    `is_target`: the weights are in the target's checkpoint. `memories`: what each of its layers
    remembers of a request, in the target's pool; `num_parameters`: its weights.
    """

    method: str
    name: str
    folder: str
    weights_format: str
    hf_config: dict[str, Any]
    num_predicted: int | None
    is_target: bool = False
    memories: tuple[LayerMemory | None, ...] = ()
    num_parameters: int = 0


class DraftWish(msgspec.Struct, frozen=True):
    """Arguments about drafts, and the files of the draft; None: there are none."""

    config: SpeculativeConfig
    draft: DraftFacts | None

    @property
    def memories(self) -> tuple[LayerMemory | None, ...]:
        """The memory of a request in each of the draft's layers."""
        return () if self.draft is None else self.draft.memories


def gather_draft_wish(
    args: EngineOptions,
    target: dict[str, Any],
    decoder: Decoder | ForeignDecoder,
    name: str,
    folder: str,
    weights_format: str,
) -> DraftWish | None:
    """Check the arguments about drafts and find the draft's files (downloaded where they name a
    hub id); `target`: the config of the model `name` in `folder`, which is the `decoder`. None:
    nothing is drafted.

    Raises RequestError for an invalid argument, LoadError for files that cannot be read.
    """
    config = speculative_config(args)
    if config is None:
        return None
    # the layers that draft are in the model's own checkpoint
    if config.method == "mtp" and config.model is None:
        own = _facts("mtp", name, folder, weights_format, target, is_target=True)
        return DraftWish(config, _measured(own, decoder))
    if config.model is None or config.method in _WITHOUT_FILES:
        return DraftWish(config, None)
    found = locate(
        config.model,
        revision=config.revision,
        token=args.hf_token,
        download_dir=args.download_dir,
        what="weights",
    )
    form = found_format(found)
    hf_config = read_folder_config(found, form)
    method = _method(config, hf_config)
    if method in REFUSED_METHODS:
        key = "speculative_config['model']"
        raise NotBuiltYet(key, config.model, REFUSED_METHODS[method])
    draft = _facts(method, config.model, str(found), form, hf_config, is_target=False)
    # only now is the method known for which the keys can be checked
    config = msgspec.structs.replace(config, method=method)
    check_keys(config)
    return DraftWish(config, _measured(draft, decoder))


def _measured(draft: DraftFacts, target: Decoder | ForeignDecoder) -> DraftFacts:
    """The facts with a network's memory. Raises LoadError where it cannot draft for the target."""
    if not isinstance(target, Decoder):
        hint = "Use ngram, or a model that Quire runs itself."
        raise NotBuiltYet("speculative_config['method']", draft.method, hint)
    # few engines draft with networks, whose families take time to import
    if draft.method == "medusa":
        from quire.models.drafting.medusa import read_medusa

        heads = read_medusa(draft.hf_config, target)
        return msgspec.structs.replace(
            draft, num_predicted=heads.heads, num_parameters=heads.num_parameters(target.dim)
        )
    from quire.models.drafting.read import read_network

    spec = read_network(draft.method, draft.hf_config, target, ()).spec
    return msgspec.structs.replace(
        draft, memories=spec.memories, num_parameters=num_parameters(spec)
    )


def _facts(
    method: str,
    name: str,
    folder: str,
    weights_format: str,
    hf_config: dict[str, Any],
    *,
    is_target: bool,
) -> DraftFacts:
    counts = (*(hf_config.get(key) for key in _NUM_PREDICTED), proposed_tokens(hf_config))
    count = next((n for n in counts if isinstance(n, int) and n > 0), None)
    return DraftFacts(
        method=method,
        name=name,
        folder=folder,
        weights_format=weights_format,
        hf_config=hf_config,
        num_predicted=count,
        is_target=is_target,
    )


def _method(config: SpeculativeConfig, hf_config: dict[str, Any]) -> str:
    """The method of a draft: by the last part of its name, then by its config."""
    if config.method in _TAKEN_AT_THEIR_WORD:
        return config.method
    name = os.path.basename(os.path.normpath(str(config.model))).lower()
    model_type = str(hf_config.get("model_type", ""))
    for mark, method in (
        ("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"),
    ):  # fmt: skip
        if mark in name:
            return method
    kind = hf_config.get("speculators_model_type")
    if kind in ("eagle3", "eagle"):
        return str(kind)
    if isinstance(kind, str):
        return "dspark" if kind == "dspark" else "dflash"
    if model_type in ("medusa", "mlp_speculator"):
        return model_type
    if "medusa_num_heads" in hf_config:  # as the authors have it, without a type
        return "medusa"
    return "mtp" if model_type.endswith("_mtp") or model_type == "mtp" else "draft_model"
