"""Called once in every process: adds entries to tables, by name where they need torch."""

from acme_quire.resolver import RESOLVER
from quire import ModelRegistry
from quire.lora.resolver import LORA_RESOLVERS
from quire.models.formats import METHODS
from quire.models.formats.fp8 import read_fp8
from quire.plugins.tables import EC_CONNECTORS, LOAD_FORMATS, OP_PROVIDERS
from quire.server.output_parsing import REASONING_PARSERS, TOOL_PARSERS, ReasoningFormat, ToolFormat
from quire.server.output_parsing.state_table import ParserState, Reads

TOOL_CALLS = ToolFormat(
    "acme",
    {
        "content": ParserState(Reads.CONTENT, {"<call>": "call"}),
        "call": ParserState(Reads.ENVELOPE, {"</call>": "content"}, then="after"),
        "after": ParserState(Reads.CONTENT, {"</call>": "content", "<call>": "call"}),
    },
)


def register() -> None:
    """Add a model, and an entry to every other table."""
    ModelRegistry.register_model("AcmeForCausalLM", "acme_quire.model:FAMILY")
    METHODS.register("acme-fp8", read_fp8)
    LOAD_FORMATS.register("acme", "acme_quire.loading:open_weights")
    OP_PROVIDERS.register("acme", "acme_quire.ops:implementations")
    EC_CONNECTORS.register("AcmeConnector", "acme_quire.connector:AcmeConnector")
    LORA_RESOLVERS.register("acme", RESOLVER)
    TOOL_PARSERS.register("acme", TOOL_CALLS)
    REASONING_PARSERS.register("acme", ReasoningFormat("acme", ("<why>",), ("</why>",)))
