"""Models and machines for the tests of `resolve()`, written by hand from the published configs."""

from quire.config.args.engine_args import EngineArgs
from quire.config.facts import EMBEDDED_NAME, ModelFacts
from quire.hardware.facts import GpuFacts, MachineFacts
from quire.models.layer_memory import KeyValues, RecurrentState
from quire.models.max_length import LengthFacts
from quire.models.reading.text_part import PART, VISION

GIB = 2**30


def make_model(**changes):
    """Qwen3-0.6B unless changed."""
    facts = {
        "name": "Qwen/Qwen3-0.6B",
        "architecture": "Qwen3ForCausalLM",
        "model_type": "qwen3",
        "checkpoint_dtype": "bfloat16",
        "hf_config": {},
        "num_parameters": 596_049_920,
        "num_layers": 28,
        "hidden_size": 1024,
        "widest": 6144,
        "vocab_size": 151_936,
        "memories": (KeyValues(8, 128),) * 28,
        "length": LengthFacts(40_960, 40_960, "max_position_embeddings of config.json"),
        "generation_config": {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "do_sample": True,
            "eos_token_id": [151_645, 151_643],
        },
        "generation_config_source": "generation_config.json",
    }
    facts = {**facts, **changes}
    folder = f"/models/{facts['name']}"
    return ModelFacts(**{"folder": folder, "tokenizer_folder": folder, **facts})


def make_machine(**changes):
    """A laptop without bfloat16 instructions unless changed."""
    facts = {
        "cpu_name": "Laptop CPU",
        "num_cpus": 8,
        "num_cores": 4,
        "features": ("avx2",),
        "total_memory_bytes": 16 * GIB,
        "free_memory_bytes": 12 * GIB,
    }
    return MachineFacts(**{**facts, **changes})


def tiny(name="tiny"):
    """The shape `tiny` of the random checkpoints, stored in float32."""
    return make_model(
        name=name,
        checkpoint_dtype="float32",
        num_parameters=1_000_000,
        num_layers=4,
        hidden_size=128,
        widest=768,
        vocab_size=1024,
        memories=(KeyValues(2, 32),) * 4,
        length=LengthFacts(8192, 8192, "max_position_embeddings of config.json"),
        generation_config={},
        generation_config_source="the model has no generation_config.json",
    )


LLAMA_8B_LAYER = {
    "attn.qkv": 25_165_824,
    "attn.o": 16_777_216,
    "mlp.up": 117_440_512,
    "mlp.down": 58_720_256,
}


def llama_8b():
    """Llama-3.1-8B: 128k context."""
    return make_model(
        name="meta-llama/Llama-3.1-8B",
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_parameters=8_030_261_248,
        generation_config={**make_model().generation_config, "eos_token_id": [128_001, 128_009]},
        num_layers=32,
        hidden_size=4096,
        widest=28_672,
        vocab_size=128_256,
        memories=(KeyValues(8, 128),) * 32,
        layer_products=(LLAMA_8B_LAYER,) * 32,
        length=LengthFacts(131_072, 131_072, "max_position_embeddings of config.json"),
    )


def gemma_2b(dtype="float32"):
    """Gemma-2-2B: every other layer has a window of 4096."""
    return make_model(
        name="google/gemma-2-2b",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        checkpoint_dtype=dtype,
        num_parameters=2_614_341_888,
        num_layers=26,
        hidden_size=2304,
        widest=18_432,
        vocab_size=256_000,
        memories=(KeyValues(4, 256, window=4096), KeyValues(4, 256)) * 13,
        length=LengthFacts(8192, 8192, "max_position_embeddings of config.json"),
        generation_config={},
        generation_config_source="the model has no generation_config.json",
    )


def mamba_2_8b():
    """Mamba-2.8B: a state in each of 64 layers, and no length in its config."""
    return make_model(
        name="state-spaces/mamba-2.8b-hf",
        architecture="MambaForCausalLM",
        model_type="mamba",
        checkpoint_dtype="float32",
        num_parameters=2_768_345_600,
        num_layers=64,
        hidden_size=2560,
        widest=10_240,
        vocab_size=50_280,
        memories=(RecurrentState(numbers=3 * 5120, wide_numbers=16 * 5120),) * 64,
        length=LengthFacts(None, None, "no length key in config.json"),
        generation_config={},
        generation_config_source="generation_config.json",
    )


SERVER = make_machine(
    cpu_name="Server CPU",
    num_cpus=128,
    num_cores=64,
    features=("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    total_memory_bytes=512 * GIB,
    free_memory_bytes=480 * GIB,
)
CONTAINER = make_machine(
    cpu_name="Server CPU",
    num_cpus=2,
    num_cores=2,
    features=("avx2", "avx512f", "avx512_bf16"),
    total_memory_bytes=4 * GIB,
    free_memory_bytes=3 * GIB,
    memory_limit_source="the container",
    thread_limit=1,
)
LAPTOP = make_machine()

H200 = make_machine(
    cpu_name="Server CPU",
    gpu=GpuFacts("NVIDIA H200", (9, 0), 132, 141 * GIB, 140 * GIB),
    gpu_missing="",
    torch_cuda="13.0",
)
SMALL_GPU = make_machine(
    gpu=GpuFacts("NVIDIA RTX 4070", (8, 9), 46, 12 * GIB, 11 * GIB),
    torch_cuda="13.0",
    free_memory_bytes=60 * GIB,
)
PAIRS = {
    "llama-8b_on_an_h200": (
        EngineArgs(model="meta-llama/Llama-3.1-8B", max_model_len=8192, deterministic=True),
        llama_8b(),
        H200,
    ),
    "llama-8b_in_8_bit_floats_on_an_h200": (
        EngineArgs(model="meta-llama/Llama-3.1-8B", quantization="fp8", kv_cache_dtype="fp8"),
        llama_8b(),
        H200,
    ),
    "llama-8b_offloaded_from_a_small_gpu": (
        EngineArgs(model="meta-llama/Llama-3.1-8B", max_model_len=8192, cpu_offload_gb=10),
        llama_8b(),
        SMALL_GPU,
    ),
    "qwen3-0.6b_on_a_laptop": (EngineArgs(model="Qwen/Qwen3-0.6B"), make_model(), LAPTOP),
    "qwen3-0.6b_on_a_server": (EngineArgs(model="Qwen/Qwen3-0.6B"), make_model(), SERVER),
    "qwen3-0.6b_in_a_container": (
        EngineArgs(model="Qwen/Qwen3-0.6B", max_num_seqs=16, max_model_len=-1),
        make_model(),
        CONTAINER,
    ),
    "embedded_on_a_laptop": (EngineArgs(), tiny(name=EMBEDDED_NAME), LAPTOP),
    "tiny_with_a_small_pool": (
        EngineArgs(
            model="tiny",
            max_model_len=256,
            num_gpu_blocks_override=20,
            block_size=16,
            max_num_batched_tokens=16,
            async_scheduling=True,
        ),
        tiny(),
        LAPTOP,
    ),
    "tiny_float32_on_a_server": (EngineArgs(model="tiny"), tiny(), SERVER),
    "llama-8b_on_a_server": (
        EngineArgs(model="meta-llama/Llama-3.1-8B", gpu_memory_utilization=0.9),
        llama_8b(),
        SERVER,
    ),
    "llama-8b_with_given_kv_memory": (
        EngineArgs(
            model="meta-llama/Llama-3.1-8B",
            max_model_len=8192,
            kv_cache_memory_bytes=2 * GIB,
            enable_chunked_prefill=False,
            served_model_name=["llama", "default"],
        ),
        llama_8b(),
        SERVER,
    ),
    "gemma-2b_on_a_server": (EngineArgs(model="google/gemma-2-2b"), gemma_2b(), SERVER),
    "gemma-2b_float16_on_a_laptop": (
        EngineArgs(model="google/gemma-2-2b", generation_config="vllm"),
        gemma_2b("float16"),
        LAPTOP,
    ),
    "mamba-2.8b_on_a_server": (
        EngineArgs(model="state-spaces/mamba-2.8b-hf", dtype="bfloat16", max_model_len=65_536),
        mamba_2_8b(),
        SERVER,
    ),
    "pictures_on_a_laptop": (
        EngineArgs(
            model="pictures",
            limit_mm_per_prompt={"image": {"count": 4}},
            allowed_media_domains=["a.example", "b.example"],
            allowed_local_media_path="/pictures",
            journal_media_bytes=1000,
            mm_processor_cache_gb=0.5,
            media_io_kwargs={"image": {"rgba_background_color": [0, 0, 1]}},
        ),
        make_model(hf_config={PART: {VISION: {}}}),
        LAPTOP,
    ),
    "qwen3-0.6b_wishes": (
        EngineArgs(
            model="Qwen/Qwen3-0.6B",
            dtype="half",
            seed=7,
            max_logprobs=-1,
            scheduling_policy="priority",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            stream_interval=4,
            override_generation_config={"temperature": 0.1, "max_new_tokens": 64},
        ),
        make_model(),
        LAPTOP,
    ),
}
