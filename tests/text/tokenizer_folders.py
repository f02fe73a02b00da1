"""Tokenizer folders of every class, trained on sentences, written without transformers."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quire.text.tokenizer import Tokenizer as OurTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and isn't tired.",
    "def main(argument):\n    return argument + 12345  # a comment",
    "Größe, naïve café, señor, déjà vu — “quotes” … ½",
    "Привет, мир! 你好,世界。 こんにちは 안녕하세요",
    "emoji 😀 👩‍👩‍👧 🇩🇪 and so on; we'll see, it's 's 'm 've 're.",
    "hello world hello there hello token",
] * 3
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CLASSES = ("byte_level", "byte_fallback", "gemma_like", "unigram", "wordpiece", "no_decoder")


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: a metaspace before the text, bytes for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.train_from_iterator(CORPUS, _fallback_trainer(["<unk>", "<s>", "</s>"]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def gemma_like() -> Tokenizer:
    """No blank before the text, none stripped behind it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.train_from_iterator(CORPUS, _fallback_trainer(["<pad>", "</s>", "<s>", "<unk>"]))
    return tokenizer


def _fallback_trainer(special: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=special + BYTES,
        limit_alphabet=40,
        initial_alphabet=["▁"],
        show_progress=False,
    )


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300,
        special_tokens=["[UNK]", "[CLS]", "[SEP]", "[PAD]", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_with_suffix() -> Tokenizer:
    """A decoder that looks ahead (word ends), which only the library's own stream can follow."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=250,
        special_tokens=["<unk>", "<s>", "</s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def odd_sequence() -> Tokenizer:
    """Byte fallback behind other stages: none of the kinds that are read as tables."""
    tokenizer = gemma_like()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return tokenizer


@cache
def tokenizer_json(kind: str) -> str:
    """The class's tokenizer.json; bytes are plain vocabulary, not special tokens."""
    whole = json.loads(globals()[kind]().to_str())
    whole["added_tokens"] = [t for t in whole["added_tokens"] if t["content"] not in BYTES]
    return json.dumps(whole)


def write_folder(
    folder: Path,
    kind: str = "byte_level",
    config: dict[str, Any] | None = None,
    special_tokens_map: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint's tokenizer files; `config` adds to tokenizer_config.json, None removes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    whole = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **(config or {}),
    }
    write_json(folder / "tokenizer_config.json", {k: v for k, v in whole.items() if v is not None})
    if special_tokens_map is not None:
        write_json(folder / "special_tokens_map.json", special_tokens_map)
    if model_config is not None:
        write_json(folder / "config.json", model_config)
    return folder


def write_vocab_and_merges(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """GPT-2's files: vocab.json, merges.txt, and tokenizer_config.json when given."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(tokenizer_json("byte_level"))["model"]
    # A token over the border that GPT-2 draws before letters and Qwen2 does not.
    model["vocab"]["(a"] = len(model["vocab"])
    model["merges"].append(["(", "a"])
    write_json(folder / "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    if config is not None:
        write_json(folder / "tokenizer_config.json", config)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def load_both(folder: Path, **options: Any) -> tuple[OurTokenizer, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        oracle = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
    return OurTokenizer.from_folder(folder, **options), oracle
