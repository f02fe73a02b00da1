"""A user's settings of a pooler: the fields of `pooler_config`, checked."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.errors import InvalidParameter
from quire.models.pooling.spec import PoolingTask
from quire.params.pooling import GONE_TASKS

SequenceType = Literal["CLS", "LAST", "MEAN"]
TokenType = Literal["ALL", "STEP"]

_GONE = {
    "normalize": "Its name is use_activation.",
    "softmax": "Its name is use_activation.",
    "activation": "Its name is use_activation.",
    "logit_bias": "Its name is logit_mean.",
}
"""Names of earlier releases of the reference -> what to do."""


class PoolerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Pooling of hidden states; None: as the model's files say.

    `task` is the one that is served. `pooling_type` is one of both types, by its value.
    `use_activation`: whether vectors are normalised and labels activated. `dimensions` cuts
    vectors. Labels are (x - logit_mean) / logit_sigma before their activation. `step_tag_id` and
    `returned_token_ids` belong to STEP: the token whose places are returned, and the columns. With
    `enable_chunked_processing` a server embeds texts of up to `max_embed_len` tokens in pieces.
    `enable_flash_late_interaction`: token vectors are compared where they are computed.
    """

    task: PoolingTask | None = None
    pooling_type: SequenceType | TokenType | None = None
    seq_pooling_type: SequenceType | None = None
    tok_pooling_type: TokenType | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    enable_flash_late_interaction: bool = True


def pooler_config(given: dict[str, Any] | None) -> PoolerConfig:
    """Check `pooler_config`. Raises InvalidParameter."""
    options = dict(given or {})
    for name, hint in _GONE.items():
        if name in options:
            value = options[name]
            raise InvalidParameter(f"pooler_config[{name!r}]", value, "there is no such key", hint)
    if options.get("task") in GONE_TASKS:
        hint = f"Use {GONE_TASKS[options['task']]}."
        raise InvalidParameter("pooler_config['task']", options["task"], "it is gone", hint)
    try:
        config = msgspec.convert(options, PoolerConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(PoolerConfig.__struct_fields__)
        allowed = f"{error}; its fields are {fields}"
        raise InvalidParameter("pooler_config", given, allowed) from None
    if config.logit_sigma == 0:
        raise InvalidParameter("pooler_config['logit_sigma']", 0, "it divides, so it is not 0")
    for name in ("dimensions", "max_embed_len"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InvalidParameter(f"pooler_config[{name!r}]", value, "it must be at least 1")
    return _without_sugar(config)


def _without_sugar(config: PoolerConfig) -> PoolerConfig:
    """The config with `pooling_type` in the place of the type that it is."""
    given = config.pooling_type
    if given is None:
        return config
    if config.seq_pooling_type is not None or config.tok_pooling_type is not None:
        allowed = "seq_pooling_type or tok_pooling_type is given as well"
        raise InvalidParameter("pooler_config['pooling_type']", given, allowed, "Give one of them.")
    name = "tok_pooling_type" if given in ("ALL", "STEP") else "seq_pooling_type"
    return msgspec.structs.replace(config, pooling_type=None, **{name: given})
