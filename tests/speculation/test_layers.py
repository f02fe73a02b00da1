"""The same answers with drafts whatever the layers are: windows, latents, mixtures, states. The
experts of tokens are those without drafts, too.
"""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.hardware.native import find_native
from tests.models.hostile.models import Library
from tests.runner.drafting.test_mtp import NAMES, Oracle
from tests.speculation.crowd import answers
from tests.speculation.drafters import Recorder, Replay, Wild, install

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

K = 5
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1}
ALWAYS = NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 99, K]]}
ENGINE = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 6,
    "max_num_batched_tokens": 20, "block_size": 4, "num_gpu_blocks_override": 90,
}  # fmt: skip
PREEMPTED = {"async_scheduling": True, "num_gpu_blocks_override": 50}
LENGTHS = (3, 17, 29, 9, 12, 1, 22, 14)
VARIANTS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
    {"prompt_logprobs": 1},
    {"logit_bias": {7: 3.0}, "temperature": 1.0, "stop_token_ids": [9, 11]},
]
MIXTURES = ("mixtral", "gpt_oss", "deepseek_v3", "step3p5", "glm4_moe")
DEFAULT = ("deepseek_v3", "gemma2")
"""Sigmoids of scores and latents; windows and full layers in the same pages."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = Library(tmp_path_factory.mktemp("made"))
    return lambda name: str(made[name].folder)


def generate(llm):
    first = [(7 * i * i + 11) % 90 + 3 for i in range(max(LENGTHS))]
    prompts = [
        {"prompt_token_ids": first[:n] if i % 3 else first[-n:]} for i, n in enumerate(LENGTHS)
    ]
    params = [
        SamplingParams(
            **{"temperature": 0.0, "ignore_eos": True} | VARIANTS[i % len(VARIANTS)],
            seed=i, max_tokens=25, logprobs=2, detokenize=False,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    experts = [output.outputs[0].routed_experts for output in outputs]
    return answers(outputs), [None if each is None else each.tolist() for each in experts]


@pytest.mark.parametrize("load", [{}, PREEMPTED], ids=["plain", "preempted"])
@pytest.mark.parametrize("name", [*MIXTURES, "gemma2", "cohere2", "gemma3n", "zamba2", "jamba"])
@pytest.mark.sharp(when=lambda name: name in DEFAULT)
def test_whatever_the_layers_are(name, load, folders):
    engine = ENGINE | {"model": folders(name)}
    if name in MIXTURES:
        engine["enable_return_routed_experts"] = True
    with LLM(**engine) as llm:
        right = generate(llm)
    with LLM(**engine | (load or {"max_num_seqs": 1})) as llm:
        assert generate(llm) == right, "without drafts"
    with LLM(**engine | load, speculative_config=ALWAYS) as llm:
        recorder = Recorder()
        install(llm, recorder, K)
        assert generate(llm) == right
        for make, spoiled in ((Replay, 0.0), (Replay, 0.3), (Wild, 0.5), (Replay, 1.0)):
            drafter = make(recorder.answers, spoiled=spoiled, vocab=90)
            install(llm, drafter, K)
            for _ in range(2):  # the second time prompts are cached
                assert generate(llm) == right
            assert drafter.num_drafted > 20
            assert drafter.num_accepted > 0 or spoiled == 1.0


@pytest.mark.parametrize("load", [{}, PREEMPTED], ids=["plain", "preempted"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sharp(when=lambda name, load: name == "qwen3_next" and load)
def test_layers_that_predict_further_tokens(name, load, tmp_path):
    torch.manual_seed(1)
    engine = ENGINE | {"model": str(Oracle(name).write(tmp_path / "model"))}
    with LLM(**engine) as llm:
        right = generate(llm)
    for num_tokens in (1, 3, 7):
        config = {"method": "mtp", "num_speculative_tokens": num_tokens}
        config["num_speculative_tokens_per_batch_size"] = [[1, 99, num_tokens]]
        with LLM(**engine | load, speculative_config=config, disable_log_stats=False) as llm:
            for _ in range(2):
                assert generate(llm) == right
            accepted = "vllm:spec_decode_num_accepted_tokens"
            assert [each.value for each in llm.get_metrics() if each.name == accepted][0] > 0
