"""The view of the plan's model, with the methods by which programs ask for its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.config.views.config_json import ConfigJson
from quire.config.views.view import Fact, Fixed, PlanView
from quire.models.foreign.implementation import AnyDecoder
from quire.models.foreign.spec import ForeignAttention, ForeignCache, ForeignDecoder
from quire.models.spec import Attention, BlockAttention, LatentAttention, single_mixers

if TYPE_CHECKING:
    import torch


class ModelView(PlanView):
    """`vllm_config.model_config`. Heads: of the first layer with attention, 0 without any."""

    name = "model_config"
    parts = ("model", "sampling")
    architecture = Fact()
    trust_remote_code = Fixed(False)
    enable_sleep_mode = Fixed(True)
    enable_prompt_embeds = Fact("takes_prompt_embeds")
    tokenizer = Fact("tokenizer_folder")
    is_encoder_decoder = Fixed(False)

    @property
    def is_multimodal_model(self) -> bool:
        """Whether prompts may have pictures."""
        return self.plan.media is not None

    @property
    def served_model_name(self) -> str:
        """The first name that the model answers to."""
        return str(self.plan.model.served_model_names[0])

    @property
    def skip_tokenizer_init(self) -> bool:
        """Whether there is no tokenizer."""
        return self.tokenizer is None

    @property
    def enforce_eager(self) -> bool:
        """Whether steps run without captured graphs."""
        return not self.plan.parallel.use_graphs

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations; torch is imported for it."""
        import torch

        found: torch.dtype = getattr(torch, self.plan.model.dtype)
        return found

    @property
    def runner_type(self) -> str:
        """generate or pooling."""
        return "generate" if self.plan.model.generates else "pooling"

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks that requests may ask for."""
        pooled: tuple[str, ...] = (
            () if self.plan.model.pooler is None else self.plan.model.pooler.tasks
        )
        return ("generate", *pooled) if self.plan.model.generates else pooled

    @property
    def hf_config(self) -> ConfigJson:
        """The model's config.json."""
        return ConfigJson(self.plan.model.hf_config)

    @property
    def hf_text_config(self) -> ConfigJson:
        """The part of config.json about the language model."""
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        """Architectures that config.json names."""
        named: list[str] = self.plan.model.hf_config["architectures"]
        return list(named)

    @property
    def is_moe(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.get_num_experts() > 0

    @property
    def use_mla(self) -> bool:
        """Whether its attention is over latents."""
        return isinstance(self._attention, LatentAttention)

    @property
    def embedding_size(self) -> int:
        """The length of a pooled vector; of a model that generates, of a hidden state."""
        size: int = (
            self.plan.model.embedding_size if self.plan.model.pooler else self.get_hidden_size()
        )
        return size

    def get_vocab_size(self) -> int:
        """The number of ids that it embeds."""
        size: int = self.plan.model.vocab_size
        return size

    def get_hidden_size(self) -> int:
        """The width of a hidden state."""
        return self._decoder.dim

    def get_inputs_embeds_size(self) -> int:
        """The width of an embedded token, which is that of a hidden state."""
        return self.get_hidden_size()

    def get_num_layers(self, parallel_config: object = None) -> int:
        """The number of layers; every worker has all."""
        return self.get_total_num_hidden_layers()

    def get_total_num_hidden_layers(self) -> int:
        """The number of layers."""
        decoder = self._decoder
        if isinstance(decoder, ForeignDecoder):
            return decoder.num_layers
        return len(decoder.blocks)

    def get_num_attention_heads(self, parallel_config: object = None) -> int:
        """Query heads; every worker has all."""
        attention = self._attention
        if isinstance(attention, ForeignCache):  # which does not say
            plan: Any = self.plan
            return int(plan.model.hf_config.get("num_attention_heads") or attention.kv_heads)
        return 0 if attention is None else attention.heads

    def get_num_kv_heads(self, parallel_config: object = None) -> int:
        """Key/value heads; every worker has all."""
        return self.get_total_num_kv_heads()

    def get_total_num_kv_heads(self) -> int:
        """Key/value heads; over latents there is one."""
        attention = self._attention
        if attention is None:
            return 0
        return 1 if isinstance(attention, LatentAttention) else attention.kv_heads

    def get_head_size(self) -> int:
        """The numbers of a key; over latents, those of a latent with its rotated part."""
        attention = self._attention
        if attention is None:
            return 0
        if isinstance(attention, LatentAttention):
            return attention.rank + attention.rotated
        return attention.head_dim

    def get_sliding_window(self) -> int | None:
        """Reach of the first layer with attention, in tokens; None: to the beginning."""
        attention = self._attention
        if attention is None or isinstance(attention, LatentAttention | BlockAttention):
            return None
        return attention.window

    def get_num_experts(self) -> int:
        """The most experts of a layer; 0 without."""
        decoder = self._decoder
        if isinstance(decoder, ForeignDecoder):
            return 0
        mixtures = [block.experts for block in decoder.blocks]
        return max((mixture.experts for mixture in mixtures if mixture is not None), default=0)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The sampling parameters that the model's files set."""
        return dict(self.plan.sampling.sampling_defaults)

    @property
    def _decoder(self) -> AnyDecoder:
        plan: Any = self.plan
        decoder: AnyDecoder = plan.model.decoder
        return decoder

    @property
    def _attention(
        self,
    ) -> Attention | LatentAttention | BlockAttention | ForeignAttention | ForeignCache | None:
        decoder = self._decoder
        if isinstance(decoder, ForeignDecoder):
            kept: list[ForeignAttention | ForeignCache] = [*decoder.calls, *decoder.caches]
            return kept[0] if kept else None
        mixers = (mixer for block in decoder.blocks for mixer in single_mixers(block.mixer))
        kinds = Attention | LatentAttention | BlockAttention
        return next((m for m in mixers if isinstance(m, kinds)), None)
