"""Small checkpoints of transformers' own classes, whose weights are far from gentle, and what
transformers computes with them.
"""

import torch
import transformers

from quire.testing.tiny_tokenizer import write_tokenizer

VOCAB = 320
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
}
FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral", "Gemma", "Gemma2")
_OWN = {"Mistral": {"sliding_window": 24}, "Gemma2": {"sliding_window": 24, "num_labels": 1}}


def make(folder, family, kind, **keys):
    """Write a checkpoint of transformers' `family` + `kind`; return its model."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **_OWN.get(family, {}), **keys})
    torch.manual_seed(len(family) + len(kind))
    model = getattr(transformers, family + kind)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.mul_(3.0)
            elif "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return model


def prompts(seed=0, lengths=(1, 2, 31, 32, 33, 64, 100, 160)):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 300, (n,), generator=draw).tolist() for n in lengths]


@torch.inference_mode()
def hidden(model, ids):
    """The hidden states [n, C] after the final norm."""
    body = getattr(model, "model", model)
    return body(torch.tensor([ids])).last_hidden_state[0]
