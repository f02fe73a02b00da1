"""The clients: what is installed for each, and the module with its modes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """`requirements`: for pip or npm; the first is the package whose version is reported.
    `module`: the file in this folder (tests/clients/node for npm's).
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    is_node: bool = False


def _npm(name: str, module: str, *requirements: str) -> Client:
    return Client(name, module, requirements, is_node=True)


CLIENTS = (
    Client("openai 2", "openai_sdk", ("openai>=2,<3",)),
    Client("openai 3", "openai_sdk", ("openai>=3,<4",)),
    Client("anthropic", "anthropic_sdk", ("anthropic>=2,<3",)),
    _npm("openai for Node", "openai_sdk", "openai@7"),
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
    Client("LangChain", "langchain", ("langchain", "langchain-openai", "langchain-anthropic")),
    Client("LlamaIndex", "llama_index", ("llama-index-llms-openai-like",)),
    Client("pydantic-ai", "pydantic_agents", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("instructor", "instructor_modes", ("instructor[anthropic]",)),
    Client("openai-agents", "openai_agents", ("openai-agents",)),
    Client("dspy", "dspy_programs", ("dspy",)),
    Client("smolagents", "smolagents_agents", ("smolagents[openai]",)),
    Client("llm", "llm_command", ("llm",)),
    Client("lm-eval", "lm_eval_tasks", ("lm-eval[api]",)),
)
