"""`describe` says of each model what distinguishes it."""

import pytest

from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.show import describe
from tests.models.hostile.models import cases

EXPECTED = {
    "llama-llama3": ["llama3 scaling by 8 from 16", "rms_norm[eps 0.05](x)"],
    "llama-linear": ["linear scaling by 3"],
    "llama-yarn": ["yarn by 4 from 16"],
    "llama-dynamic": ["dynamic NTK by 4 if max_model_len exceeds 64"],
    "phi3": ["longrope: long factors if max_model_len exceeds 48", "the first 12 of 16 values"],
    "gemma2": [
        "s = 1.5 * tanh(s / 1.5)",
        "logits = 2 * tanh(logits / 2)",
        "over the last 4 tokens",
        "over all tokens before",
        "ids) * 8",
        "x = x + rms_norm_1p[eps 0.05](h)",
        "head tied to embedding",
    ],
    "gemma3": ["sliding, window 4: layers 0", "full: layers 1", "over each head"],
    "olmo2": ["h = x", "over all heads together"],
    "granite": ["x = x + 0.5 * h", "s = 0.3 * q @ k", "@ x * 0.5"],
    "gpt2": ["position_embedding[64 x 64]", "gelu_tanh(Wu @ h + bias)", "layer_norm[eps 0.05]"],
    "mixtral": ["top 2 of softmax(Wr @ h), made to sum to 1    # 4 experts", "active per token"],
    "cohere": ["g = h", "pairs of neighbours", "each head, with its own weight", "@ x * 0.4"],
    "gpt_neox": ["# of its own", "the first 4 of 16 values", "gelu(Wu @ g + bias)"],
    "bloom": ["ALiBi, largest bias 8", "ids)\nx = layer_norm[eps 0.05](x)\n"],
    "falcon-alibi": ["s = s - 0.25 * slope * distance"],
    "olmo": ["to +-0.9", "layer_norm_without_weight[eps 1e-05]"],
    "nemotron": ["layer_norm_1p[eps 0.05]", "relu2(Wu @ h + bias)"],
    "opt": ["position_embedding[66 x 64](positions + 2)"],
    "phi": ["head[96 x 64] @ x + bias"],
    "apertus": ["xielu(Wu @ h)"],
    "llama4": ["the tokens of its chunk of 8", "chunks of 8: layers"],
    "mamba": ["state   6,912 bytes per request", "s = e^(-e^a * d) * s + d * b * x"],
    "falcon_h1": ["sum of the results", "states of 6 x 12 numbers", "bytes per token"],
    "zamba2": [
        "h = rms_norm[eps 0.05](x, embedding)    # transformer 0, which layers share",
        "rank 8 next to W, rank 8 next to Wg and Wu",
        "h = rms_norm[eps 0.05](x + t)",
    ],
    "qwen3_5": ["s = s + k (b * (v - k s))", "recurrent state"],
    "lfm2_moe": ["h = Wo @ (c * conv(b * x)) + bias    # over 3 tokens"],
    "gemma4": [
        "k, v are those of layer 1",
        "of 20 frequencies the first 8",
        "without a weight",
        "v = k",
        "each layer's",
        "h = Wp @ (gelu_tanh(Wg @ x) * v)",
        "x = s * x",
        "w = w * scale[e]",
        "0.125 * rms_norm[eps 0.05](h)",
        "full: layers 1 (",
        "sliding, window 4: layers 0 (",
    ],
    "step3p5": ["one gate for each head", "factors bounded by 0.4"],
    "mimo_v2": ["v = v, zeros    # 16 values, kept as 24"],
    "gemma3n": ["3 streams", "sparse(Wg @ h, 0.7)", "# rank 5", "all but the first +="],
    "gpt_oss": ["one sink per head", "bounded by 0.4", "softmax of the top 2 of Wr @ h"],
}


@pytest.mark.parametrize("name", cases())
def test_a_description_names_what_is_special(checkpoints, name):
    text = describe(read_spec(read_config(checkpoints[name].folder)))
    for phrase in EXPECTED.get(name, ["layers 0..2:"] if name == "llama" else []):
        assert phrase in text
    assert "parameters" in text and ("KV cache" in text or "recurrent state" in text)
