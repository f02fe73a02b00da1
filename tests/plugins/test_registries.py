"""Parts of an engine that are registered by vLLM's names, and run."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.as_vllm.parsers import ReasoningParserManager, ToolParserManager
from quire.as_vllm.registries import (
    ECConnectorFactory,
    KVConnectorFactory,
    LoRAResolverRegistry,
    register_model_loader,
    register_quantization_config,
)
from quire.config.args.engine_args import EngineArgs
from quire.config.ec_transfer_config import ec_transfer_config
from quire.errors import InvalidParameter, NotBuiltYet, PluginError
from quire.lora.resolver import FolderResolver
from quire.models.formats import METHODS
from quire.models.formats.fp8 import read_fp8
from quire.models.loading.readers.checkpoint_files import CheckpointFiles
from quire.models.loading.readers.tensor_map import TensorMap
from quire.ops import select
from quire.ops.catalog import CATALOG
from quire.ops.registry import Implementation
from quire.plugins.tables import OP_PROVIDERS
from quire.server.output_parsing import ReasoningFormat, choose_parsers
from quire.server.output_parsing.parser_registry import TOOL_PARSERS
from quire.tiers.kv_transfer_config import kv_transfer_config

PARAMS = SamplingParams(temperature=0, max_tokens=3)


def test_a_load_format_reads_the_weights(packages):
    """Refused by name until it is registered; then its tensors are the model's: negated norms of
    the end change the answer.
    """
    with pytest.raises(NotBuiltYet, match="load_format='tensorizer'.*A plugin can register it"):
        EngineArgs(load_format="tensorizer").create_engine_config()
    [usual] = LLM().generate("The sun", PARAMS)

    @register_model_loader("tensorizer")
    def opened(folder, decoder):
        files = CheckpointFiles(folder)
        tensors = {name: files.read(name).clone() for name in files.entries}
        tensors["model.norm.weight"] = -tensors["model.norm.weight"]
        return TensorMap(tensors, folder)

    [found] = LLM(load_format="tensorizer").generate("The sun", PARAMS)
    assert found.outputs[0].token_ids[0] != usual.outputs[0].token_ids[0]


def test_loaders_that_fill_modules_of_vllm_are_refused(packages):
    class Loader:
        def load_weights(self, model, model_config):
            """vLLM's."""

    with pytest.raises(TypeError, match="loads weights into modules of vLLM"):
        register_model_loader("mine")(Loader)
    with pytest.raises(PluginError, match="load format 'safetensors' is Quire's own"):
        register_model_loader("safetensors")(print)


def test_a_quantization_method_is_a_reader(packages):
    register_quantization_config("mine")(read_fp8)
    assert METHODS["mine"] is read_fp8
    with pytest.raises(TypeError, match="a class that computes with vLLM's layers"):
        register_quantization_config("other")(dict)


def test_a_connector_is_found_by_its_name(packages):
    ECConnectorFactory.register_connector("Mine", "acme.connectors", "Connector")
    config = ec_transfer_config({"ec_connector": "Mine"})
    assert (config.ec_connector_module_path, config.ec_connector) == (
        "acme.connectors",
        "Connector",
    )
    KVConnectorFactory.register_connector("Mine", "acme", "Connector")
    found = kv_transfer_config({"kv_connector": "Mine", "kv_role": "kv_both"})
    assert (found.kv_connector_module_path, found.kv_connector) == ("acme", "Connector")
    with pytest.raises(PluginError, match="connector of K/V 'NixlConnector' is Quire's own"):
        KVConnectorFactory.register_connector("NixlConnector", "acme", "Connector")


def test_a_resolver_of_adapters_is_an_object(packages):
    resolver = FolderResolver("/adapters")
    LoRAResolverRegistry.register_resolver("mine", resolver)
    assert LoRAResolverRegistry.get_resolver("mine") is resolver
    assert set(LoRAResolverRegistry.get_supported_resolvers()) == {"mine"}
    with pytest.raises(PluginError, match="resolver 'mine' is registered twice"):
        LoRAResolverRegistry.register_resolver("mine", FolderResolver("/others"))
    for wrong in (FolderResolver, "acme:Resolver"):
        with pytest.raises(PluginError, match="an object with the coroutine resolve_lora"):
            LoRAResolverRegistry.register_resolver("other", wrong)


def test_parsers_are_tables(packages):
    mine = ReasoningFormat("mine", ("<why>",), ("</why>",))
    ReasoningParserManager.register_module("mine", module=mine)
    plan = choose_parsers("none", "mine", None)
    assert plan.reasoning is mine
    assert ReasoningParserManager.get_reasoning_parser("mine").reasoning is mine
    ToolParserManager.register_module(["a", "b"])(TOOL_PARSERS["hermes"])
    assert choose_parsers("b", "none", None).tool_format is TOOL_PARSERS["hermes"]
    with pytest.raises(PluginError, match="tool parser 'hermes' is Quire's own"):
        ToolParserManager.register_module("hermes", module=TOOL_PARSERS["mistral"])
    with pytest.raises(TypeError, match="a ToolFormat .* classes that parse by themselves"):
        ToolParserManager.register_module("c")(dict)
    with pytest.raises(NotImplementedError, match="files of Python are not loaded"):
        ToolParserManager.import_tool_parser("parser.py")
    with pytest.raises(InvalidParameter, match="absent"):
        choose_parsers("absent", "none", None)


def test_a_provider_of_ops_comes_first(packages):
    def implementations(facts):
        function = lambda *args, **named: CATALOG["multiply"].definition(*args, **named)  # noqa: E731
        return [Implementation("multiply", "mine", function, lambda facts: True)]

    OP_PROVIDERS.register("mine", implementations)
    chosen = {c.op: c.provider for c in select(device="cpu", dtype=torch.float32).report()}
    assert chosen["multiply"] == "mine" and chosen["norm"] != "mine"
    [found] = LLM(dtype="float32").generate("The sun", PARAMS)
    OP_PROVIDERS._added.clear()
    [usual] = LLM(dtype="float32").generate("The sun", PARAMS)
    assert found.outputs[0].token_ids == usual.outputs[0].token_ids
