"""Tokenizer, chat template and image processor of random models, made in code.

Ids 0 to 2 are the special tokens of every preset. The tokens around images follow, in the order of the family's record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from parkd_engine.families.presets.shapes import END_TOKEN_ID, TINY_VOCABULARY, preset_of
from parkd_engine.families.records import vision_of
from parkd_engine.vision.images import processor_class

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN = SPECIAL_TOKENS[END_TOKEN_ID]
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING_TEXT = (
    "A server holds one conversation in memory and parks the others. When a conversation comes back, its rows are "
    "restored and the prompt is not read again.",
    "user assistant system tools message content role arguments function name type string",
    "The quick brown fox jumps over the lazy dog. 0123456789",
)
VISION_TEMPLATE = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
    "{% if part.type == 'image' %}{{ image }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ show(message.content) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with images between texts. `preset_tokenizer` defines how an image is written."""


def preset_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the preset with this configuration."""
    vision = vision_of(config)
    if vision is None:
        return tiny_tokenizer()
    tokenizer = tiny_tokenizer(vision.tokens)
    start, end, image = vision.tokens[:3]
    written = start if vision.begins_only else f"{start}{image}{end}"
    tokenizer.chat_template = f"{{% set image = '{written}' %}}{VISION_TEMPLATE}"
    return tokenizer


def preset_processor(model: str, config: Any) -> Any:
    """The library's image processor for `random:NAME`, whose configuration is `config`; None for a text model."""
    settings = preset_of(model).processor
    return None if settings is None else processor_class(config)(**settings)


def tiny_tokenizer(special_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of at most `TINY_VOCABULARY` tokens with a ChatML template. It encodes any text.

    `special_tokens` get the first ids after the template's own.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=[*SPECIAL_TOKENS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN)
    tokenizer.chat_template = CHATML
    return tokenizer
