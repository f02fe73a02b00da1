"""Adapters in an engine against merged transformers, by family, stored form and dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quire import LLM, LoRARequest, SamplingParams, embedded
from quire.errors import BadAdapter, InvalidParameter
from quire.models import find_family, read_spec
from quire.models.adapters.targets import AdapterTargets, leaf_of
from quire.models.config_reader import read_config
from quire.testing import make_checkpoint
from tests.models.adapters.made import adapted
from tests.models.adapters.test_reading import OF_TRANSFORMERS
from tests.models.hostile.models import HOSTILE, Library, theirs
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, write
from tests.support.lora.adapters import Asked, Steps

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ADAPTERS = Path(__file__).parent / "adapters"
STYLES = ("shout", "comment")
NUM_TOKENS = 8
BY_DEFAULT = (
    "llama",
    "gpt2",
    "phi3",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v2",
    "gemma3",
)
STORED = FORMATS | BYTE_FORMATS


def distances(asked, model):
    """How far each log-probability of the five likeliest tokens is from the model's."""
    ids = torch.tensor(asked.prompt + asked.tokens)[None]
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False).logits[0, len(asked.prompt) - 1 :].float()
    wanted = logits.log_softmax(-1).topk(5).values
    found = torch.tensor(asked.logprobs)[:, 1:]
    return (found - wanted).abs()


def run(folder, prompt, adapter=None, **options):
    """Greedy tokens without an adapter, and with the one in a folder."""
    steps = Steps(folder, slots=1, rank=8, **options)
    worker = steps.executor.worker
    plain, own = Asked(prompt), Asked(prompt, slot=1)
    steps._launch([], [], [], [], adapter_loads=[(1, worker.read_adapter(str(adapter)))])
    steps.run([plain, own], NUM_TOKENS)
    steps.close()
    return plain, own


def check(folder, model, to, prompt, **options):
    """An engine's answers with an adapter are about as near to those of the merged model as its
    answers without are to those of the model; the adapter's effect is far larger.
    """
    targets = adaptable(folder, **options)
    base = [p.detach().clone() for p in model.parameters()]
    adapter = adapted(model, can_be=targets).save(to)
    plain, own = run(folder, prompt, adapter, **options)
    error = distances(own, model)
    with torch.no_grad():
        for weight, old in zip(model.parameters(), base, strict=True):
            weight.copy_(old)
    effect = distances(own, model)
    allowed = 2 * distances(plain, model).mean() + 3e-5
    assert error.mean() < allowed
    assert effect.mean() > 1.4 * allowed, "the adapter changes nothing"


def adaptable(folder, **options):
    """Whether a module of this name can be adapted in the engine."""
    steps = Steps(folder, slots=1, **options)
    leaves = steps.banks.targets
    steps.close()
    config = read_config(folder)
    targets = AdapterTargets(find_family(config), read_spec(config))

    def can_be(name):
        stored = targets.module(name)
        found = targets.stack(name) if stored is None else [stored]
        return all(leaf_of(leaf) in leaves for tensor in found for leaf in tensor.leaves)

    return can_be


def untied(model):
    """The model with a head of its own, so that it can be changed alone."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.sharp(when=lambda name: name in BY_DEFAULT)
def test_families(tmp_path, name):
    made = Library(tmp_path)[name]
    prompt = made.prompts[1].tolist()
    model = untied(theirs(HOSTILE[name], made.folder))
    options = {"max_len": 48, "block_size": 8 if name == "llama4" else 16}
    check(made.folder, model, tmp_path / "adapter", prompt, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    return make_checkpoint(tmp_path_factory.mktemp("source"), shape, "qwen3", dtype="float32")


PROMPT = torch.randint(3, 300, (9,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", STORED)
@pytest.mark.sharp(when=lambda name: name in ("awq", "fp8-blocks"))
def test_stored_forms(source, tmp_path, name):
    plain = write(source, tmp_path / "model", STORED[name])
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    check(tmp_path / "model", model, tmp_path / "adapter", PROMPT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.sharp(when=lambda dtype: dtype == "bfloat16")
def test_dtypes(source, tmp_path, dtype):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    check(source, model, tmp_path / "adapter", PROMPT, dtype=dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.full
def test_rounded_weights(source, tmp_path, quantization):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    check(source, model, tmp_path / "adapter", PROMPT, quantization=quantization)


def scaling(name, module):
    """What B @ A counts in the adapters of tools/train_adapters.py."""
    if name == "shout":
        return 16 / 8
    alpha, rank = 12 if module.endswith("v_proj") else 8, 4
    return alpha / (2 if module.endswith("layers.5.self_attn.o_proj") else rank) ** 0.5


@pytest.mark.parametrize("name", STYLES)
def test_adapters_that_peft_has_written(name):
    """Merged by hand: square roots of ranks, and patterns of names, count as they should."""
    folder = embedded.path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(ADAPTERS / name / "adapter_model.safetensors")
    modules = [part.removesuffix(".lora_A.weight") for part in tensors if ".lora_A." in part]
    for module in modules:
        a, b = (tensors[f"{module}.lora_{part}.weight"].float() for part in "AB")
        weight = model.get_submodule(module.removeprefix("base_model.model.")).weight
        weight.data += scaling(name, module) * (b @ a)
    assert len(modules) == {"shout": 42, "comment": 24}[name]
    plain, own = run(folder, PROMPT, ADAPTERS / name)
    assert distances(own, model).max() < 1e-4
    assert distances(plain, model).max() > 0.1


def test_adapters_that_were_trained():
    """The two of the embedded model, which PEFT has made, answer in styles of their own."""
    prompt = "def read(path):\n"
    asked = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [None, *(LoRARequest(n, i, str(ADAPTERS / n)) for i, n in enumerate(STYLES, 1))]
    with LLM(enable_lora=True, max_loras=2) as llm:
        outputs = llm.generate([prompt] * 3, asked, lora_request=requests, use_tqdm=False)
    plain, shout, comment = (output.outputs[0].text for output in outputs)
    assert shout.isupper() and not plain.isupper()
    lines = comment.strip().split("\n")
    assert len(lines) > 1 and all(line.startswith("#") for line in lines)
    assert "#" not in plain


def test_only_named_modules_may_be_changed():
    request = LoRARequest("shout", 1, str(ADAPTERS / "shout"))
    asked = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(enable_lora=True, lora_target_modules=["q_proj", "o_proj"]) as llm:
        text = "not among the modules that lora_target_modules allows"
        with pytest.raises(BadAdapter, match=text):
            llm.generate("def", asked, lora_request=request, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="the model has no such module"):
        LLM(enable_lora=True, lora_target_modules=["query"])
