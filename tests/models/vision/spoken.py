"""Small models that take pictures with all their files, and transformers' answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.models.vision.spoken_models import END, IMAGE_ID, PAD, SPOKEN, START, WORDS
from tests.models.vision.wholes import TEXT, write_model


def write_spoken(name: str, folder: Path) -> torch.nn.Module:
    """Write all files; returns transformers' model."""
    model = write_model(SPOKEN[name].whole, folder)
    write_side_files(name, folder)
    return model


def write_side_files(name: str, folder: Path) -> None:
    spoken = SPOKEN[name]
    special = [PAD, START, END, spoken.soft, *spoken.tokens]
    vocab = {token: i for i, token in enumerate([*special, *WORDS][: TEXT["vocab_size"]])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast", **spoken.names}
    files = {
        "tokenizer_config.json": names,
        "processor_config.json": spoken.processor,
        "preprocessor_config.json": spoken.image,
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST)


def greedy_after(
    model: torch.nn.Module, prompt: list[int], inputs: dict[str, Any], tokens: list[int]
) -> tuple[list[int], torch.Tensor]:
    """transformers' likeliest token after the prompt and after each of `tokens` but the last, apart
    from the placeholder, and the log-probabilities of `tokens`; `inputs` are those of the pictures.
    """
    ids = torch.tensor([prompt + tokens[:-1]])
    kinds = _kinds(model.config.model_type, ids, len(prompt), inputs)
    with torch.no_grad():
        if model.config.model_type == "llama4":
            logits = _logits_of_llama4(model, ids, inputs)
        else:
            logits = model(input_ids=ids, use_cache=False, **inputs, **kinds).logits[0]
    if model.config.model_type in ("aya_vision", "cohere2_vision"):
        # their classes forget the scale that the classes of the text alone have
        logits = logits * model.config.text_config.logit_scale
    after = logits[len(prompt) - 1 :].log_softmax(-1)
    words = after.index_fill(1, torch.tensor([IMAGE_ID]), float("-inf"))
    return words.argmax(-1).tolist(), after[torch.arange(len(tokens)), torch.tensor(tokens)]


def _logits_of_llama4(
    model: torch.nn.Module, ids: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """transformers 5.24 fails when it makes the output of the whole model."""
    embeds = model.get_input_embeddings()(ids)
    if inputs:
        rows = model.get_image_features(**inputs, return_dict=True).last_hidden_state
        rows = model.multi_modal_projector(rows.flatten(0, -2))
        embeds = embeds.masked_scatter((ids == IMAGE_ID)[..., None], rows)
    return model.language_model(inputs_embeds=embeds, use_cache=False).logits[0]


def _kinds(
    model_type: str, ids: torch.Tensor, num_prompt: int, inputs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The argument that says which tokens are of pictures, or of a prompt with some."""
    of_pictures = (ids == IMAGE_ID).int()
    if model_type == "gemma3":
        return {"token_type_ids": of_pictures}
    if model_type == "paligemma":
        # without it, transformers drops the mask of text alone where no layer has a window
        prefix = num_prompt if inputs else 0
        return {"token_type_ids": (torch.arange(ids.shape[1]) >= prefix).int()[None]}
    if model_type == "gemma4" or ("image_grid_thw" in inputs and model_type != "kimi_k25"):
        return {"mm_token_type_ids": of_pictures}
    return {}
