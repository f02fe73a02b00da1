"""The tokenizer of the embedded model, its special tokens and its chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END, SYSTEM, USER, ASSISTANT = SPECIALS = (
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
# Runs of spaces, line ends and punctuation are pieces of their own and no word swallows a line end,
# so that a prompt that stops after "):", a line end or an indentation is cut as training text is.
PIECES = r" {2,}|\n+|\r+|\t+| ?\p{N}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('This model knows the roles system, user and assistant only.') }}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on `texts`: digits one by one, runs of spaces as tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return BEGIN, the ids of `text`, END."""
    return [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]
