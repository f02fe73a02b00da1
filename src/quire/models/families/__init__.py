"""The family of an architecture, imported when asked for, and the way from a config to a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

from quire.errors import UnsupportedArchitecture
from quire.models.added import AddedModel, check_added, resolved
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats import read_storage
from quire.models.pooling.conversion import Form, converted, form_of, generators_of, with_pooler
from quire.models.pooling.keys import with_pooler_keys
from quire.models.pooling.late import base_of, projected
from quire.models.pooling.spec import PoolerSpec
from quire.models.reading.keys import LeftKey, foreign_among, names_own_code
from quire.models.reading.reference import Reference, reference_of, reference_of_kind
from quire.models.reading.text_part import PART, outer_objects
from quire.models.reading.unbuilt import WHY_NOT
from quire.models.rules import Family
from quire.models.spec import Decoder
from quire.plugins import NameTable

_HOMES = {
    "AXK1ForCausalLM": "deepseek.AXK1",
    "AfmoeForCausalLM": "afmoe",
    "AlbertForPreTraining": "bert.ALBERT",
    "Apertus1p5TextForCausalLM": "llama_like.APERTUS_1P5",
    "ApertusForCausalLM": "llama_like.APERTUS",
    "ArceeForCausalLM": "llama_like.ARCEE",
    "AriaTextForCausalLM": "llama_experts.ARIA",
    "BailingHybridForCausalLM": "kimi_linear.BAILING_HYBRID",
    "BailingMoeV3ForCausalLM": "kimi_linear.BAILING_HYBRID",
    "BambaForCausalLM": "mamba.BAMBA",
    "BertForPreTraining": "bert.BERT",
    "BertSpladeSparseEmbeddingModel": "bert.BERT_SPLADE",
    "BioGptForCausalLM": "opt.BIOGPT",
    "BloomForCausalLM": "alibi.BLOOM",
    "CLIPModel": "clip.CLIP",
    "CLIPTextModel": "clip.CLIP",
    "CLIPTextModelWithProjection": "clip.CLIP",
    "ChatGLMForConditionalGeneration": "glm.CHATGLM",
    "ChatGLMModel": "glm.CHATGLM",
    "CodeGenForCausalLM": "gpt.CODEGEN",
    "Cohere2ForCausalLM": "cohere.COHERE2",
    "Cohere2MoeForCausalLM": "cohere.COHERE2_MOE",
    "CohereForCausalLM": "cohere.COHERE",
    "CwmForCausalLM": "llama_like.CWM",
    "DbrxForCausalLM": "dbrx",
    "DeepseekV2ForCausalLM": "deepseek.DEEPSEEK_V2",
    "DeepseekV32ForCausalLM": "deepseek.DEEPSEEK_V32",
    "DeepseekV3ForCausalLM": "deepseek.DEEPSEEK_V3",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Dots1ForCausalLM": "llama_experts.DOTS1",
    "ElectraForPreTraining": "bert.ELECTRA",
    "Emu3ForCausalLM": "llama.EMU3",
    "Ernie4_5ForCausalLM": "ernie4_5.ERNIE4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5.ERNIE4_5_MOE",
    "Exaone4ForCausalLM": "exaone.EXAONE4",
    "ExaoneForCausalLM": "exaone.EXAONE",
    "ExaoneMoeForCausalLM": "exaone.EXAONE_MOE",
    "FalconForCausalLM": "falcon.FALCON",
    "FalconH1ForCausalLM": "falcon.FALCON_H1",
    "FalconMambaForCausalLM": "mamba.FALCON_MAMBA",
    "FlexOlmoForCausalLM": "olmo.FLEX_OLMO",
    "FlintForCausalLM": "llama_experts.FLINT",
    "GPT2LMHeadModel": "gpt.GPT2",
    "GPTBigCodeForCausalLM": "gpt.GPT_BIGCODE",
    "GPTJForCausalLM": "gpt.GPTJ",
    "GPTNeoForCausalLM": "gpt.GPT_NEO",
    "GPTNeoXForCausalLM": "gpt_neox.GPT_NEOX",
    "GPTNeoXJapaneseForCausalLM": "gpt_neox.GPT_NEOX_JAPANESE",
    "Gemma2ForCausalLM": "gemma.GEMMA2",
    "Gemma3ForCausalLM": "gemma.GEMMA3",
    "Gemma3nForCausalLM": "gemma3n.GEMMA3N",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4.UNIFIED",
    "GemmaForCausalLM": "gemma.GEMMA",
    "Glm4ForCausalLM": "glm.GLM4",
    "Glm4MoeForCausalLM": "glm.GLM4_MOE",
    "Glm4MoeLiteForCausalLM": "deepseek.GLM4_MOE_LITE",
    "Glm4vMoeTextModel": "glm.GLM4_MOE_IN_VL",
    "Glm4vTextModel": "glm.GLM4_IN_VL",
    "GlmOcrTextModel": "glm.GLM_OCR",
    "GlmForCausalLM": "glm.GLM",
    "GlmMoeDsaForCausalLM": "deepseek.GLM_MOE_DSA",
    "GptOssForCausalLM": "llama_experts.GPT_OSS",
    "GraniteForCausalLM": "granite.GRANITE",
    "GraniteMoeForCausalLM": "granite.PLAIN",
    "GraniteMoeHybridForCausalLM": "granite.GRANITE_HYBRID",
    "GraniteMoeSWAForCausalLM": "granite.SWA",
    "GraniteMoeSharedForCausalLM": "granite.PLAIN",
    "GraniteSWAForCausalLM": "granite.GRANITE_SWA",
    "HYV3ForCausalLM": "hunyuan.HY_V3",
    "HeliumForCausalLM": "llama_like.HELIUM",
    "HunYuanDenseV1ForCausalLM": "hunyuan.HUNYUAN",
    "HunYuanMoEV1ForCausalLM": "hunyuan.HUNYUAN_MOE",
    "HyperCLOVAXForCausalLM": "llama_like.HYPERCLOVAX",
    "IQuestCoderForCausalLM": "llama_like.IQUESTCODER",
    "InternLM2ForCausalLM": "llama_like.INTERNLM2",
    "InternLM3ForCausalLM": "llama_like.INTERNLM3",
    "Jais2ForCausalLM": "llama_like.JAIS2",
    "JambaForCausalLM": "mamba.JAMBA",
    "JinaVLForRanking": "jina.RANKING",
    "KimiLinearForCausalLM": "kimi_linear.KIMI_LINEAR",
    "LLaMAForCausalLM": "llama",
    "Lfm2ForCausalLM": "lfm2.LFM2",
    "Lfm2MoeForCausalLM": "lfm2.MOE",
    "Lfm3ForCausalLM": "lfm2.LFM3",
    "Llama4ForCausalLM": "llama4",
    "LlamaBidirectionalForSequenceClassification": "llama_encoders.LLAMA_BIDIRECTIONAL",
    "LlamaBidirectionalModel": "llama_encoders.LLAMA_BIDIRECTIONAL",
    "LlamaForCausalLM": "llama",
    "MPTForCausalLM": "alibi.MPT",
    "MT5EncoderModel": "t5.MT5",
    "MT5ForTokenClassification": "t5.MT5",
    "Mamba2ForCausalLM": "mamba.MAMBA2",
    "MambaForCausalLM": "mamba.MAMBA",
    "MellumForCausalLM": "llama_experts.MELLUM",
    "MiMoForCausalLM": "qwen.MIMO",
    "MiMoV2FlashForCausalLM": "mimo_v2",
    "MiniCPM3ForCausalLM": "minicpm.MINICPM3",
    "MiniCPMForCausalLM": "minicpm.MINICPM",
    "MiniMaxForCausalLM": "minimax.MINIMAX",
    "MiniMaxM2ForCausalLM": "minimax.MINIMAX_M2",
    "MiniMaxM3ForCausalLM": "minimax.PUBLISHED",
    "MiniMaxM3SparseForCausalLM": "minimax.PUBLISHED",
    "MiniMaxM3VLForCausalLM": "minimax.TRANSFORMERS",
    "Ministral3ForCausalLM": "mistral.MINISTRAL3",
    "MinistralForCausalLM": "mistral.MINISTRAL",
    "Mistral4ForCausalLM": "mistral4",
    "MistralForCausalLM": "mistral.MISTRAL",
    "MistralLarge4ForCausalLM": "mistral_large4",
    "MixtralForCausalLM": "mistral.MIXTRAL",
    "MptForCausalLM": "alibi.MPT",
    "NemotronForCausalLM": "llama_like.NEMOTRON",
    "NemotronHForCausalLM": "nemotron_h",
    "OPTForCausalLM": "opt.OPT",
    "Olmo2ForCausalLM": "olmo.OLMO2",
    "Olmo3ForCausalLM": "olmo.OLMO3",
    "OlmoForCausalLM": "olmo.OLMO",
    "OlmoHybridForCausalLM": "olmo.OLMO_HYBRID",
    "OlmoeForCausalLM": "olmo.OLMOE",
    "OpenAIGPTLMHeadModel": "gpt.OPENAI_GPT",
    "PaddleOCRTextModel": "ernie4_5.ERNIE4_5_IN_VL",
    "PersimmonForCausalLM": "gpt_neox.PERSIMMON",
    "Phi3ForCausalLM": "phi.PHI3",
    "PhiForCausalLM": "phi.PHI",
    "PhiMoEForCausalLM": "phi.PHIMOE",
    "PhimoeForCausalLM": "phi.PHIMOE",
    "Qwen2ForCausalLM": "qwen.QWEN2",
    "Qwen2MoeForCausalLM": "qwen.QWEN2_MOE",
    "Qwen3ForCausalLM": "qwen.QWEN3",
    "Qwen3MoeForCausalLM": "qwen.QWEN3_MOE",
    "Qwen3NextForCausalLM": "qwen.QWEN3_NEXT",
    "Qwen3VLMoeTextModel": "qwen.QWEN3_MOE_IN_VL",
    "Qwen3_5ForCausalLM": "qwen.QWEN3_5",
    "Qwen3_5MoeForCausalLM": "qwen.QWEN3_5_MOE",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "SeedOssForCausalLM": "llama_like.SEED_OSS",
    "Siglip2Model": "clip.SIGLIP",
    "Siglip2TextModel": "clip.SIGLIP",
    "SiglipModel": "clip.SIGLIP",
    "SiglipTextModel": "clip.SIGLIP",
    "SmolLM3ForCausalLM": "llama_like.SMOLLM3",
    "SolarOpenForCausalLM": "llama_experts.SOLAR_OPEN",
    "StableLmForCausalLM": "llama_like.STABLELM",
    "Starcoder2ForCausalLM": "llama_like.STARCODER2",
    "Step3p5ForCausalLM": "step3p5",
    "T5EncoderModel": "t5.T5",
    "T5ForTokenClassification": "t5.T5",
    "UMT5EncoderModel": "t5.UMT5",
    "UMT5ForTokenClassification": "t5.UMT5",
    "VaultGemmaForCausalLM": "gemma.VAULT",
    "YoutuForCausalLM": "deepseek.YOUTU",
    "Zamba2ForCausalLM": "zamba2",
}
"""Architecture -> the module with its family, which is its `FAMILY` unless another name follows."""

_ENCODERS = {
    "Albert": "bert.ALBERT",
    "Bert": "bert.BERT",
    "Camembert": "bert.CAMEMBERT",
    "Data2VecText": "bert.DATA2VEC_TEXT",
    "DistilBert": "bert.DISTILBERT",
    "Electra": "bert.ELECTRA",
    "EuroBert": "llama_encoders.EUROBERT",
    "Gte": "gte.GTE",
    "GteNew": "gte.GTE_NEW",
    "DebertaV2": "deberta",
    "JinaBert": "jina.V2",
    "JinaEmbeddingsV3": "jina.V3",
    "MPNet": "bert.MPNET",
    "ModernBert": "modernbert",
    "New": "gte.NEW",
    "NomicBert": "nomic_bert",
    "Roberta": "bert.ROBERTA",
    "XLMRoberta": "bert.XLM_ROBERTA",
}
_ENCODER_FORMS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_HOMES |= {stem + form: home for stem, home in _ENCODERS.items() for form in _ENCODER_FORMS}

ADDED: NameTable[AddedModel] = NameTable(
    "architecture", reserved=_HOMES, check=check_added, home=f"{__name__}:ADDED"
)
"""Models of plugins and programs."""


def architectures() -> tuple[str, ...]:
    """The names that config.json may have under `architectures`, sorted."""
    return tuple(sorted({*_HOMES, *ADDED}))


def added_class(architecture: object) -> type[Any] | None:
    """The class of transformers that was registered for an architecture, if that is one. Raises
    UnsupportedArchitecture for what was registered and cannot run.
    """
    if not isinstance(architecture, str) or architecture not in ADDED:
        return None
    found = resolved(architecture, ADDED[architecture])
    return None if isinstance(found, Family) else found


def _is_described(architecture: str) -> bool:
    """Whether a family describes an architecture of this very name."""
    if architecture in ADDED:
        return isinstance(resolved(architecture, ADDED[architecture]), Family)
    return architecture in _HOMES


def find_family(
    config: Mapping[str, Any], pooler: PoolerSpec | None = None, form: Form | None = None
) -> Family:
    """The family of the first architecture that config.json names and we know. A name such as
    `XModel` or `XForSequenceClassification` is a form of the generator X. `pooler`: the one that
    was decided for the model; `form`: what is made of a generator where none is decided yet.

    Raises UnsupportedArchitecture, which names the nearest; code that a repository brings along is
    never run.
    """
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UnsupportedArchitecture(
            f"config.json: architectures={named!r} is not a list of names."
        )
    if pooler is not None:
        form = form_of(pooler)
    for name in named:
        if (found := _family_named(name, form)) is not None:
            return replace(found, is_part=True) if PART in config else found
    raise UnsupportedArchitecture(_refusal(named, config))


def _family_named(name: str, form: Form | None) -> Family | None:
    if _is_described(name):
        return _in_form(family_of(name), form)
    if (found := _family_in_form(name)) is not None:
        return found
    if (base := base_of(name)) is not None and (found := _pooling_family(base)) is not None:
        return projected(found)
    return None


def _in_form(family: Family, form: Form | None) -> Family:
    """A family that is named itself: a generator's as it is or in a form, or a pooler's."""
    if form == "terms":  # a model without them is refused with its pooler
        family, form = family.terms or family, "embed"
    if family.pools:
        return with_pooler(family, ())
    return family if form is None else converted(family, form)


def _pooling_family(architecture: str) -> Family | None:
    """The family of an architecture that pools; None for one that is not known."""
    if _is_described(architecture):
        return with_pooler(family_of(architecture), ())
    return _family_in_form(architecture)


def pools(architecture: str) -> bool:
    """Whether an architecture is known by its name or by what it is made of, and pools prompts."""
    if _is_described(architecture):
        return family_of(architecture).pools
    base = base_of(architecture)
    return _pooling_family(architecture if base is None else base) is not None


def _family_in_form(architecture: str) -> Family | None:
    """The family of a pooling architecture whose generator is known."""
    found = generators_of(architecture)
    if found is None:
        return None
    generators, form = found
    home = next((name for name in generators if _is_described(name)), None)
    return None if home is None else converted(family_of(home), form)


def family_of(architecture: str) -> Family:
    """The family of one of the `architectures` that a family describes."""
    if architecture in ADDED:
        added = resolved(architecture, ADDED[architecture])
        assert isinstance(added, Family), "a class is not described"
        return added
    module, _, name = _HOMES[architecture].partition(".")
    found = getattr(import_module(f".{module}", __package__), name or "FAMILY")
    forms: tuple[Family, ...] = found if isinstance(found, tuple) else (found,)
    return next(family for family in forms if architecture in family.architectures)


def summary_of(architecture: str) -> str:
    """The family in one line: the docstring of the function that reads its config, or its file."""
    if architecture in ADDED:
        return f"Added by {ADDED.holder(architecture)}."
    describe = family_of(architecture).describe
    describe = describe.func if isinstance(describe, partial) else describe
    module, _, _ = _HOMES[architecture].partition(".")
    text = describe.__doc__ or import_module(f".{module}", __package__).__doc__ or ""
    return " ".join(text.split())


def read_spec(
    config: Mapping[str, Any], pooler: PoolerSpec | None = None, form: Form | None = None
) -> Decoder:
    """The spec of the model that a config.json describes; `pooler` and `form`: see `find_family`.

    Raises UnsupportedArchitecture, UnknownConfigKey for a key of unknown meaning,
    UnsupportedConfigValue for a known key at a value that is not implemented, LoadError for a
    missing key. How the weights are quantised is checked as well; it is not part of the spec.
    """
    return read_with_foreign(config, pooler, form)[0]


def read_with_foreign(
    config: Mapping[str, Any], pooler: PoolerSpec | None = None, form: Form | None = None
) -> tuple[Decoder, tuple[LeftKey, ...]]:
    """As `read_spec`, and the foreign keys of the config (reading/keys.py)."""
    read_storage(config)
    outer = outer_objects(config)
    reader = ConfigReader(config, "".join(f"{name}." for name in outer))
    family = find_family(config, pooler, form)
    decoder = family.describe(reader)
    if decoder.pooler is not None:
        own = with_pooler_keys(reader, replace(decoder.pooler, token_types=decoder.token_types))
        decoder = replace(decoder, pooler=own if pooler is None else pooler)
    check_attention(decoder, config)
    reader.ignore(PART)
    architectures = [*config["architectures"], *family.architectures]
    is_closed = names_own_code(config, architectures)
    reference = _reference(config, architectures)
    return decoder, foreign_among(reader.left(), reference, outer, is_closed=is_closed)


def _reference(config: Mapping[str, Any], architectures: list[str]) -> Reference | None:
    kind = config.get("model_type")
    if PART in config and (found := reference_of_kind(kind)) is not None:
        return found
    return reference_of(architectures, kind)


def check_attention(decoder: Decoder, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedConfigValue for a generator whose tokens see those after them."""
    if decoder.generates and decoder.is_indivisible:
        key = "use_bidirectional_attention"
        key = key if config.get(key) else "is_causal"
        allowed = "attention to what comes before, unless the model only pools (runner='pooling')"
        raise unsupported(key, config.get(key), allowed)


def _refusal(named: list[str], config: Mapping[str, Any]) -> str:
    if not named:
        return (
            "config.json names no architecture. Name one of docs/models.md "
            '(`quire show --architectures`) with hf_overrides={"architectures": [...]}.'
        )
    part = config.get(PART)
    what = f"The architecture {named[0]} is not supported"
    if part:
        whole = ", ".join(part["architectures"]) or "The model"
        # a type that nobody knows has no architectures of its own
        is_known = named != part["architectures"]
        text = named[0] if is_known else f"of the type {config.get('model_type')}"
        what = f"{whole} is not supported: its text is {text}, which no family describes"
    why = next((WHY_NOT[name] for name in named if name in WHY_NOT), None)
    if why is not None:
        what += f": {why}"
    near = [name for name in get_close_matches(named[0], architectures(), 3) if name not in named]
    if near:
        what += f"; the nearest names are {', '.join(near)}"
    text = f"{what}. All that are known are in docs/models.md (`quire show --architectures`)."
    if config.get("auto_map"):
        text += " The model's own Python code (auto_map) is never executed by Quire."
    return text
