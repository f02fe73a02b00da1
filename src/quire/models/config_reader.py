"""Strict reading of a Hugging Face config.json: each key is consumed, known to be irrelevant, or an
error.

A key that is silently ignored can change every answer, so a family takes its keys through
`ConfigReader`, which remembers them; `finish()` raises `UnknownConfigKey` for whatever is left.
Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from quire.errors import LoadError, ModelNotFound, UnknownConfigKey, UnsupportedConfigValue
from quire.text.json_files import read_plain_json
from quire.text.model_files import has_file

# Keys that say nothing about the computation of a forward pass, by reason.
_IRRELEVANT_BY_REASON = {
    "identity and provenance; auto_map names code of the repository, which is never executed": (
        "architectures model_type auto_map _name_or_path name_or_path _commit_hash "
        "transformers_version unsloth_fixed unsloth_version finetuning_task task_specific_params "
        "tokenizer_class language name"
    ),
    "how the weights are stored: the engine decides on its own dtype": "torch_dtype dtype",
    "how the weights are quantised, which models/formats reads": (
        "quantization_config compression_config quantization quantization_file"
    ),
    "training only": (
        "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
        "residual_dropout embedding_dropout gradient_checkpointing router_aux_loss_coef "
        "router_jitter_noise output_router_logits moe_loss_weight moe_jitter_eps "
        "dropout activation_dropout classifier_dropout "
        "emb_pdrop embed_dropout layerdrop init_std init_device embedding_initializer_range "
        "aux_loss_alpha seq_aux ep_size init_method block_mlp_init_scale block_out_init_scale "
        "block_use_xavier_init conv_use_xavier_init"
    ),
    "outputs and kernels of another library": (
        "use_cache cache_implementation output_attentions output_hidden_states output_past "
        "return_dict tf_legacy_loss torchscript attn_implementation _attn_implementation "
        "_attn_implementation_autoset "
        "experts_implementation use_flash_attention_2 chunk_size_feed_forward pretraining_tp "
        "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 "
        "bias_dropout_fusion masked_softmax_fusion slow_but_exact fused_add_norm "
        "calc_logits_for_entire_prompt"
    ),
    "how states of Mamba are initialised, or computed by another library": (
        "time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor "
        "rescale_prenorm_residual use_mambapy use_associative_scan use_falcon_mambapy "
        "use_mamba_kernels use_mem_eff_path chunk_size mamba_chunk_size residual_in_fp32 "
        "mamba_ssm_cache_dtype num_logits_to_keep"
    ),
    "token ids and labels: text and sampling, not the decoder": (
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id "
        "forced_bos_token_id forced_eos_token_id unk_token_id eod_token_id prefix id2label "
        "label2id num_labels _num_labels problem_type"
    ),
    "heads for classification that a causal model does not have": (
        "summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout"
    ),
    "lengths, which models/max_length.py reads": (
        "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_target_positions "
        "max_sequence_length max_seq_length seq_len model_max_length"
    ),
    "generation defaults of old files: quire reads generation_config.json": (
        "max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty "
        "length_penalty num_beams num_beam_groups diversity_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size num_return_sequences bad_words_ids begin_suppress_tokens "
        "suppress_tokens early_stopping output_scores return_dict_in_generate "
        "exponential_decay_length_penalty remove_invalid_values use_bfloat16"
    ),
}
IRRELEVANT = frozenset(key for keys in _IRRELEVANT_BY_REASON.values() for key in keys.split())
"""Keys that say nothing about the computation, whatever their value."""

_OF_OTHER_PARTS = frozenset(
    (
        *("vision_config", "audio_config", "image_token_id", "image_token_index"),
        *("video_token_id", "audio_token_id", "boi_token_id", "boi_token_index"),
        *("eoi_token_id", "eoi_token_index", "boa_token_id", "eoa_token_id"),
        *("eoa_token_index", "mm_tokens_per_image", "vision_soft_tokens_per_image"),
        *("vision_start_token_id", "vision_end_token_id", "vision_feature_layer"),
        *("spatial_merge_size", "projector_hidden_act", "multimodal_projector_bias"),
        *("audio_soft_tokens_per_image",),
    )
)
"""Keys of a model that also takes pictures or sound, next to its `text_config`."""

# Keys at which only one value is implemented in any family: the one that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "use_bidirectional_attention": (False, None),
    "per_layer_config": (None, {}),
}

LARGEST_SIZE = 10**9 - 1
"""The largest whole number that a size may be; what is larger is a mistake, and arithmetic with it
takes memory or does not end.
"""

LEAST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30
"""The range of other numbers: well inside of what float32 holds."""
_MAX_SHOWN = 120
"""Characters of a value that an error shows."""

_REQUIRED: Any = object()


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder, of a model that also takes pictures or sound what
    is about text. Raises ModelNotFound when it is missing, LoadError when it is no JSON object.
    """
    path = folder / "config.json"
    if not has_file(path):
        raise ModelNotFound(
            f"{folder} has no config.json: it is no model folder in Hugging Face form."
        )
    return text_part(read_plain_json(path))


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """`config`, or where it consists of configs of several parts (`text_config` and others) that of
    text, with what stands next to it, but for the type of the whole. Keys about other parts are
    left out.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {k: v for k, v in config.items() if k not in _OF_OTHER_PARTS and v is not None}
    del outer["text_config"]
    outer.pop("model_type", None)
    return {**text, **outer}


def unsupported(
    key: str, value: object, allowed: str, file: str = "config.json"
) -> UnsupportedConfigValue:
    """The refusal of a known key at a value that is not implemented: names file, key, value and
    what would do.
    """
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = shown[: _MAX_SHOWN - 3] + "..."
    return UnsupportedConfigValue(
        f"{file}: {key}={shown} is not implemented; supported: {allowed}."
    )


def is_number(
    value: object, minimum: float = LEAST_NUMBER, maximum: float = LARGEST_NUMBER
) -> TypeGuard[int | float]:
    """Whether a value is a number in this range; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return minimum <= value <= maximum


def token_ids(key: str, value: object, vocab_size: int, file: str = "config.json") -> list[int]:
    """The ids that a key lists: one, a list of them, or null. Raises UnsupportedConfigValue for
    what is no id of the vocabulary.
    """
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ids = [i for i in listed if isinstance(i, int) and not isinstance(i, bool)]
    if len(ids) < len(listed) or not all(0 <= token_id < vocab_size for token_id in ids):
        allowed = f"an id below vocab_size={vocab_size}, a list of such ids, or null"
        raise unsupported(key, value, allowed, file)
    return ids


class ConfigReader:
    """Typed access to one JSON object of a config that remembers which keys were read.

    Invariant: after `finish()` returned, each key was taken by the family, has its neutral value,
    or is listed as irrelevant.
    """

    def __init__(
        self, config: Mapping[str, Any], where: str = "", *, is_part: bool = False
    ) -> None:
        """`where` stands before the keys in errors; is_part: of a config, without the irrelevant
        keys of whole ones.
        """
        self._config = config
        self._where = where
        self._is_part = is_part
        self._taken: set[str] = set()
        self._names: dict[str, str] = {}

    def __contains__(self, key: str) -> bool:
        return self._config.get(self._name(key)) is not None

    def rename(self, **others: str) -> None:
        """Read each key under another name if the config has it under that name: `rename(
        hidden_size="n_embd")`. Raises UnsupportedConfigValue where the config has two values.
        """
        for key, other in others.items():
            value, same = self._config.get(key), self._config.get(other)
            if same is None:
                continue
            if value is not None and value != same:
                raise unsupported(self._where + key, value, f"{other}={same!r}, its other name")
            self._taken.add(key)
            self._names[key] = other

    def supply(self, **values: Any) -> None:
        """Read these values where the config lacks the keys."""
        given = {key: value for key, value in self._config.items() if value is not None}
        self._config = {self._name(key): value for key, value in values.items()} | given

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value as JSON gave it; null counts as absent."""
        value = self._get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise LoadError(f"config.json lacks {self.at(key)}, which this model needs.")
        return default

    def integer(
        self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = LARGEST_SIZE
    ) -> Any:
        """A whole number from `minimum` to `maximum`."""
        value = self.raw(key, default)
        if value is default and default is not _REQUIRED:
            return value
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= maximum:
            raise unsupported(
                self.at(key), value, f"an integer of at least {minimum} and at most {maximum}"
            )
        return value

    def number(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        minimum: float = LEAST_NUMBER,
        maximum: float = LARGEST_NUMBER,
    ) -> Any:
        """A number from `minimum` to `maximum`."""
        value = self.raw(key, default)
        if value is default and default is not _REQUIRED:
            return value
        if not is_number(value, minimum, maximum):
            allowed = f"a positive number of at least {minimum:g} and at most {maximum:g}"
            raise unsupported(self.at(key), value, allowed)
        return float(value)

    def bound(self, key: str, absent: float | None) -> Any:
        """A positive number, or None where the file says null; `absent` is what a missing key
        means.
        """
        name = self._name(key)
        self._taken.add(name)
        if name in self._config and self._config[name] is None:
            return None
        return self.number(key, absent)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise unsupported(self.at(key), value, "true or false")
        return value

    def choice(self, key: str, table: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """The entry of `table` that the key's string names."""
        value = self.raw(key, default)
        if not isinstance(value, str) or value not in table:
            raise unsupported(self.at(key), value, ", ".join(map(repr, table)))
        return table[value]

    def choice_of(self, key: str, *allowed: Any, absent: Any = _REQUIRED) -> Any:
        """One of these values."""
        value = self.raw(key, absent)
        if isinstance(value, bool) or value not in allowed:
            raise unsupported(self.at(key), value, " or ".join(map(repr, allowed)))
        return value

    def ignore(self, *keys: str) -> None:
        """Take keys that say nothing about the computation, whatever their values."""
        self._taken.update(keys)

    def has_read(self, key: str) -> bool:
        """Whether the key was taken already, under whatever name it was asked for."""
        return key in self._taken

    def keys(self) -> tuple[str, ...]:
        """The names of all values that are not null."""
        return tuple(key for key, value in self._config.items() if value is not None)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse the key unless it is absent or has one of these values."""
        value = self._get(key)
        if value is not None and value not in allowed:
            raise unsupported(self.at(key), value, " or ".join(map(repr, allowed)))

    def section(self, key: str) -> ConfigReader | None:
        """A nested object, to be finished by the caller; None when absent or empty."""
        value = self.raw(key, None)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise unsupported(self.at(key), value, "an object")
        return ConfigReader(value, f"{self.at(key)}.", is_part=True)

    def subconfig(self, key: str) -> ConfigReader:
        """A nested object that is a config of its own; an empty one when absent."""
        value = self.raw(key, {})
        if not isinstance(value, dict):
            raise unsupported(self.at(key), value, "an object")
        return ConfigReader(value, f"{self.at(key)}.")

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    def at(self, key: str) -> str:
        """The key as errors name it."""
        return self._where + self._name(key)

    def _get(self, key: str) -> Any:
        """The value, which counts as read, or None."""
        self._taken.add(self._name(key))
        return self._config.get(self._name(key))

    def finish(self) -> None:
        """Raise unless every key of the object is accounted for."""
        for key, allowed in _NEUTRAL.items():
            value = self._config.get(key)
            if value is not None and key not in self._taken and value not in allowed:
                raise unsupported(self._where + key, value, " or ".join(map(repr, allowed)))
        known = self._taken | _NEUTRAL.keys() | (frozenset() if self._is_part else IRRELEVANT)
        unknown = sorted(k for k, v in self._config.items() if k not in known and v is not None)
        if unknown:
            names = ", ".join(self._where + key for key in unknown)
            raise UnknownConfigKey(
                f"config.json has keys whose meaning is not known here: {names}. Ignoring them "
                "could change the answers; if they are harmless, remove them with "
                f"hf_overrides={self._without(unknown[0])}."
            )

    def _without(self, key: str) -> str:
        """The override that removes a key, as JSON."""
        path = [*self._where.split(".")[:-1], key]
        return "".join(f'{{"{part}": ' for part in path) + "null" + "}" * len(path)
