"""An EAGLE-3 network for the embedded model in plain torch, trained on its own guesses."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embedded_model.checkpoint import llama_config, write_json
from embedded_model.model import Model, rotate

AUX_LAYERS = (1, 3, 5)
"""The layers of the embedded model whose inputs the network reads."""
WIDTH = 256
"""Of the network's feed-forward part; with the model's own head it has 0.8 MB."""


class DraftHead(nn.Module):
    """One layer that reads the embedding of the next token beside the model's states. It begins as
    a part of the model's last layer.
    """

    def __init__(self, target: Model) -> None:
        super().__init__()
        self.shape = shape = target.shape
        self.cos, self.sin = target.cos, target.sin
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        last, dim = target.layers[-1], shape.hidden_size
        rows = [heads * shape.head_dim] + 2 * [kv_heads * shape.head_dim]
        half = [torch.cat((part / 2, part), 1) for part in last.qkv.split(rows)]
        self.q, self.k, self.v = map(nn.Parameter, half)
        self.fc = nn.Parameter(torch.cat((torch.zeros(dim, 2 * dim), torch.eye(dim)), 1))
        self.o, self.down = (
            nn.Parameter(last.out.clone()),
            nn.Parameter(last.down[:, :WIDTH].clone()),
        )
        gate, up = last.gate_up.chunk(2)
        self.gate, self.up = nn.Parameter(gate[:WIDTH].clone()), nn.Parameter(up[:WIDTH].clone())
        self.embed_norm = nn.Parameter(target.layers[0].attention_norm.clone())
        self.hidden_norm = nn.Parameter(last.attention_norm.clone())
        self.mlp_norm, self.norm = (
            nn.Parameter(last.mlp_norm.clone()),
            nn.Parameter(target.norm.clone()),
        )

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon trains."""
        return [p for p in self.parameters() if p.ndim == 2]

    def vectors(self) -> list[nn.Parameter]:
        """The others."""
        return [p for p in self.parameters() if p.ndim == 1]

    def forward(self, target: Model, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Logits [R, T, V] of `steps` passes, from ids [R, T + steps] and the states
        [R, T, 3 * C] of the first T. Row t of pass j reads the token at t + 1 + j and, after the
        first, what pass j - 1 has made of row t; it sees the first pass's rows up to t, and its own
        before it.
        """
        count = states.shape[1]
        x, keys, values, logits = F.linear(states, self.fc), [], [], []
        for step in range(steps):
            embedded = F.embedding(ids[:, 1 + step : 1 + step + count], target.embedding)
            x = self.layer(embedded, x, step, keys, values)
            logits.append(F.linear(self.normed(x, self.norm), target.embedding))
        return logits

    def layer(
        self, embedded: Tensor, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One pass of the layer; adds its keys and values [R, H, T, D] to the lists."""
        heads, kv_heads = self.shape.num_attention_heads, self.shape.num_key_value_heads
        count = x.shape[1]
        h = torch.cat(
            (self.normed(embedded, self.embed_norm), self.normed(x, self.hidden_norm)), -1
        )
        cos, sin = self.cos[step : step + count], self.sin[step : step + count]
        q, k, v = (
            F.linear(h, w).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        q = rotate(q, cos, sin) * self.shape.head_dim**-0.5
        keys.append(rotate(k, cos, sin).repeat_interleave(heads // kv_heads, 1))
        values.append(v.repeat_interleave(heads // kv_heads, 1))
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(hidden, float("-inf"))]
        scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1).split([count] + [1] * (len(keys) - 1), -1)
        mixed = weights[0] @ values[0]
        for weight, value in zip(weights[1:], values[1:], strict=True):
            mixed = mixed + weight * value
        x = x + F.linear(mixed.transpose(1, 2).flatten(-2), self.o)
        h = self.normed(x, self.mlp_norm)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden_size,), weight, self.shape.rms_norm_eps)


@torch.no_grad()
def states_of(target: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What enters AUX_LAYERS [R, T, 3 * C], and the logits [R, T, V]."""
    x, found = F.embedding(ids, target.embedding), []
    cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
    for index, layer in enumerate(target.layers):
        if index in AUX_LAYERS:
            found.append(x)
        x = layer(x, cos, sin)
    x = F.rms_norm(x, (target.shape.hidden_size,), target.norm, target.shape.rms_norm_eps)
    return torch.cat(found, -1), F.linear(x, target.embedding)


def losses(head: DraftHead, target: Model, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The cross-entropy with the model's probabilities of each pass [steps], and how much of the
    two distributions is common, on average [steps], for ids [R, T].
    """
    states, truth = states_of(target, ids)
    count = ids.shape[1] - steps
    made = head(target, ids, states[:, :count], steps)
    loss, common = [], []
    for step, logits in enumerate(made):
        wanted = truth[:, 1 + step : 1 + step + count].softmax(-1)
        said = logits.log_softmax(-1)
        loss.append(-(wanted * said).sum(-1).mean())
        common.append(torch.minimum(wanted, said.detach().exp()).sum(-1).mean())
    return torch.stack(loss), torch.stack(common)


def parts(head: DraftHead) -> dict[str, nn.Parameter]:
    """The parameters by their names in the layout of the authors of EAGLE-3."""
    at = "midlayer."
    named = {f"{at}self_attn.{part}_proj": getattr(head, part) for part in "qkvo"}
    named |= {f"{at}mlp.{part}_proj": getattr(head, part) for part in ("gate", "up", "down")}
    named |= {at + "input_layernorm": head.embed_norm, at + "hidden_norm": head.hidden_norm}
    named |= {at + "post_attention_layernorm": head.mlp_norm, "norm": head.norm, "fc": head.fc}
    return {f"{name}.weight": parameter for name, parameter in named.items()}


@torch.no_grad()
def load_head(head: DraftHead, folder: Path) -> None:
    """Take the weights of an exported folder."""
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in parts(head).items():
        parameter.copy_(tensors[name])


def export_head(head: DraftHead, folder: Path) -> None:
    """Write the folder in the layout of the authors of EAGLE-3, bf16, over the whole vocabulary."""
    tensors = {name: t.detach().to(torch.bfloat16) for name, t in parts(head).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    layers = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}
    config = llama_config(head.shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": WIDTH,
        "tie_word_embeddings": False,
        "eagle_config": layers,
    }
    write_json(folder / "config.json", config)
