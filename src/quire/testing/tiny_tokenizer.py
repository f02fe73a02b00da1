"""A small byte-level BPE tokenizer, trained in a moment and padded to a model's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.errors import InvalidParameter

END = "<|endoftext|>"
_SPECIAL = [END, "<|im_start|>", "<|im_end|>"]
_MERGES = 400
_LINES = [
    "def add(first, second):\n    return first + second\n",
    "for index, value in enumerate(values):\n    if value is None:\n        continue\n",
    "class Block:\n    def __init__(self, size):\n        self.size = size\n",
    "The block pool gives a request the blocks that its next tokens need.",
    "A step hands out tokens until computed tokens and known tokens meet.",
    "What is the capital of France? The capital of France is Paris.",
    "once upon a time there was a small model that read every page it was given",
    "1234567890 2024-01-31 3.14159 0x1f 100% (a + b) * c == [x, y, z]",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; id 0 ends a text.

    Raises InvalidParameter if the vocabulary has no room for all bytes.
    """
    least = 256 + len(_SPECIAL)
    if vocab_size < least:
        raise InvalidParameter("vocab_size", vocab_size, f"at least {least}, one id for each byte")
    trained = json.loads(_train(min(vocab_size, least + _MERGES)).to_str())
    vocab: dict[str, int] = trained["model"]["vocab"]
    for i in range(len(vocab), vocab_size):
        vocab[f"<unused{i}>"] = i  # no merge leads there: never in a prompt, decodes as it stands
    _write(folder / "tokenizer.json", trained)
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": _SPECIAL[1:],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", facts)
    _write(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})


def _train(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return tokenizer


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
