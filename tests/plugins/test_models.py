"""Models that plugins and programs register: families, classes of transformers, and classes that
were written for vLLM, which are refused.
"""

import json
from dataclasses import replace

import pytest
import torch

import quire
from quire import LLM, SamplingParams
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import UnsupportedArchitecture
from quire.models.families import find_family, summary_of
from quire.models.families.llama import FAMILY
from quire.models.formats import METHODS, read_storage
from quire.models.formats.fp8 import read_fp8
from quire.models.formats.storage import Storage
from quire.plugins import load_general_plugins
from tests.models.foreign.tiny_models import write
from tests.support.crowded_engine import engine, prompts, run

NAME = "AcmeForCausalLM"
LLAMA = "quire.models.families.llama:FAMILY"
REGISTERS = f"""
    import quire
    def register():
        quire.ModelRegistry.register_model("{NAME}", "acme:Model")
"""
WRITTEN_FOR_VLLM = """
    import torch
    from torch import nn
    from vllm.attention import Attention
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import CacheConfig, VllmConfig
    from vllm.logger import init_logger
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
    import vllm.distributed.parallel_state

    class Layer(nn.Module):
        def __init__(self, vllm_config: VllmConfig, prefix: str = ""):
            super().__init__()
            self.qkv = QKVParallelLinear(64, 16, 4)
            self.attn = Attention(4, 16, 0.25, prefix=prefix)

    @support_torch_compile
    class Decoder(nn.Module):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
            super().__init__()
            self.layers = nn.ModuleList(Layer(vllm_config, f"{prefix}.{i}") for i in range(2))

    class Model(nn.Module):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
            super().__init__()
            self.model = Decoder(vllm_config=vllm_config, prefix=prefix)
        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            return self.model(input_ids, positions)
        def compute_logits(self, hidden_states):
            return hidden_states
        def load_weights(self, weights):
            return set()
"""
MISSING = (
    "vllm.attention.Attention, vllm.compilation.decorators.support_torch_compile, "
    "vllm.model_executor.layers.linear.QKVParallelLinear, "
    "vllm.model_executor.layers.linear.RowParallelLinear have no counterpart"
)


def acme(folder, **keys):
    """A tiny checkpoint of Llama whose config.json names our architecture."""
    write("LlamaForCausalLM", folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "architectures": [NAME], **keys}
    file.write_text(json.dumps(config))
    return folder


def greedy():
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    return {i: (ids, params.clone()) for i, ids in enumerate(prompts()[:2])}


def test_a_family_runs_models_of_another_name(packages):
    named = {"architectures": [NAME]}
    with pytest.raises(UnsupportedArchitecture, match=f"{NAME} is not supported"):
        make_plan(EngineArgs(hf_overrides=named))
    quire.ModelRegistry.register_model(NAME, LLAMA)
    assert NAME in quire.ModelRegistry.get_supported_archs()
    assert quire.ModelRegistry.is_text_generation_model(NAME)
    assert summary_of(NAME) == "Added by this program."
    params = SamplingParams(temperature=0, max_tokens=4)
    [found] = LLM(hf_overrides=named).generate("The sun", params)
    [expected] = LLM().generate("The sun", params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_family_is_given_as_such(packages):
    own = replace(FAMILY, architectures=(NAME,))
    quire.ModelRegistry.register_model(NAME, own)
    assert find_family({"architectures": [NAME]}) == own
    plan = make_plan(EngineArgs(hf_overrides={"architectures": [NAME]}))
    assert (plan.model.architecture, plan.model.model_impl) == (NAME, "quire")


def test_a_class_of_transformers_runs(packages, tmp_path):
    """Its own arithmetic: it negates the logits of Llama, so the unlikeliest tokens come."""
    source = (
        REGISTERS
        + """
    from transformers import LlamaConfig, LlamaForCausalLM
    class Config(LlamaConfig):
        model_type = "acme"
    class Model(LlamaForCausalLM):
        config_class = Config
        def forward(self, *args, **named):
            outputs = super().forward(*args, **named)
            outputs.logits = -outputs.logits
            return outputs
    """
    )
    packages.install("acme", source, {"quire.general_plugins": {"acme": "register"}})
    folder = acme(tmp_path / "model", model_type="acme")
    plan = make_plan(EngineArgs(model=str(folder), max_model_len=64, skip_tokenizer_init=True))
    assert plan.model.model_impl == "transformers"
    assert plan.reasons["model_impl"] == (
        "its class was registered by quire.general_plugins 'acme' of acme 1.0 (acme:register)"
    )
    assert quire.ModelRegistry.is_text_generation_model(NAME)
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    found = run(engine(folder, **options), greedy())
    acme(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    usual = run(engine(folder, **options), greedy())
    first = {handle: tokens[0][0] for handle, tokens in found.items()}
    likeliest = {handle: tokens[0][0] for handle, tokens in usual.items()}
    assert all(first[handle] != likeliest[handle] for handle in first)
    import acme as package

    model = package.Model.from_pretrained(folder, attn_implementation="eager").float()
    for handle, (ids, _) in greedy().items():
        assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == first[handle]


@pytest.mark.parametrize("by", ["a class", "a name"])
def test_a_class_that_was_written_for_vllm_is_refused(packages, tmp_path, by):
    packages.install("acme", WRITTEN_FOR_VLLM, {})
    sentence = (
        f"is a class that was written for vLLM (acme): {MISSING}. Register a "
        "quire.models.rules.Family, or a class of transformers whose attention goes through its "
        "attention interface: docs/plugins.md."
    )
    if by == "a name":
        quire.ModelRegistry.register_model(NAME, "acme:Model")
        config = {"architectures": [NAME]}
        with pytest.raises(UnsupportedArchitecture) as caught:
            make_plan(EngineArgs(hf_overrides=config))
        assert str(caught.value) == f"The architecture {NAME} {sentence}"
        return
    made = {"__module__": "acme", "__init__": lambda self, *, vllm_config, prefix="": None}
    with pytest.raises(UnsupportedArchitecture) as caught:
        quire.ModelRegistry.register_model(NAME, type("Model", (), made))
    assert str(caught.value) == f"The architecture Model {sentence}"


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ("acme.Model", ValueError, "must name a class or a Family as '<module>:<name>'"),
        (3, TypeError, "and is a int"),
        (dict, UnsupportedArchitecture, "builtins.dict is not a model of transformers"),
    ],
)
def test_what_is_not_a_model_is_refused(packages, given, error, why):
    with pytest.raises(error, match=why):
        quire.ModelRegistry.register_model(NAME, given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("acme:Missing", "acme has no Missing"),
        ("absent_module:X", "absent_module:X cannot be imported: ModuleNotFoundError"),
        ("acme:value", "is neither a Family nor a class"),
    ],
)
def test_a_name_that_leads_nowhere_is_said_when_the_model_is_asked_for(packages, given, why):
    packages.install("acme", "value = 1", {})
    quire.ModelRegistry.register_model(NAME, given)
    with pytest.raises(UnsupportedArchitecture, match=f"The architecture {NAME}.*{why}"):
        make_plan(EngineArgs(hf_overrides={"architectures": [NAME]}))


def test_a_quantization_method_reads_its_config(packages):
    source = """
        from quire.models.formats import METHODS, read_storage
        from quire.models.formats.fp8 import read_fp8
        def register():
            METHODS.register("acme", read_fp8)
    """
    packages.install("acme", source, {"quire.general_plugins": {"acme": "register"}})
    load_general_plugins()
    config = {"quantization_config": {"quant_method": "acme", "activation_scheme": "dynamic"}}
    assert isinstance(read_storage(config), Storage) and METHODS["acme"] is read_fp8
    with pytest.raises(TypeError, match="a class that computes with vLLM's layers has no"):
        METHODS.register("other", dict)
