"""Models with random weights, for tests and benchmarks: `random:NAME`. No files, no network.

Tiny models write readable nonsense with a tokenizer trained in code. Models of real shapes are for measuring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from parkd_engine.errors import ModelLoadError
from parkd_engine.families.draft_presets import DRAFT_PRESETS, headless
from parkd_engine.families.hybrid_presets import HYBRID_PRESETS
from parkd_engine.families.multimodal import family_of
from parkd_engine.families.random_weights import SEED, draw_weights
from parkd_engine.families.vision_presets import (
    LARGE_VISION_PRESETS,
    PROCESSORS,
    VISION_PRESETS,
    VISION_TOKENS,
    vision_template,
)
from parkd_engine.vision.images import processor_class

PREFIX = "random:"
RECIPE_VERSION = 2
"""Part of the weights' digest. Raise it if a preset's weights change."""
Placement = Callable[[str], torch.device]
"""Name of a parameter -> its device."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")

TINY_VOCABULARY = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN = "<|im_end|>"  # noqa: S105
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


@dataclass(frozen=True)
class Preset:
    """A shape: the library's `model_type` and its settings."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": TINY_VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

_SHAPES = {**HYBRID_PRESETS, **VISION_PRESETS, **LARGE_VISION_PRESETS, **DRAFT_PRESETS}
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {name: Preset(*shape) for name, shape in _SHAPES.items()}
    | {
        "tiny-llama": Preset("llama", _TINY),
        "tiny-qwen2": Preset("qwen2", {name: value for name, value in _TINY.items() if name != "head_dim"}),
        "tiny-qwen3": Preset("qwen3", _TINY),
        "tiny-qwen3-long": Preset("qwen3", {**_TINY, "max_position_embeddings": 262144}),
        "qwen3-8b": Preset(
            "qwen3",
            {
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            },
        ),
    }
)


def preset_config(model: str) -> Any:
    """The library's configuration of `random:NAME`. Raises ModelLoadError for an unknown name."""
    name = model.removeprefix(PREFIX)
    preset = PRESETS.get(name)
    if preset is None:
        raise ModelLoadError(f"There is no random model {name!r}; these are: {', '.join(sorted(PRESETS))}.")
    ids = {"bos_token_id": None, "eos_token_id": SPECIAL_TOKENS.index(END_TOKEN), "pad_token_id": None}
    if "text_config" in preset.settings:
        text = {**preset.settings["text_config"], **ids}
        return AutoConfig.for_model(preset.model_type, **{**preset.settings, "text_config": text})
    return AutoConfig.for_model(preset.model_type, **{**preset.settings, **ids})


def preset_digest(model: str, dtype: torch.dtype, device: torch.device) -> bytes:
    """16 bytes over everything that determines the weights. Each kind of device draws different numbers."""
    text = f"{model} {SEED} {RECIPE_VERSION} {dtype} {device.type}"
    return blake2b(text.encode(), digest_size=16, person=b"parkd-random").digest()


def random_model(
    config: Any, dtype: torch.dtype, device: torch.device, layer_gain: float = 1.0, place: Placement | None = None
) -> Any:
    """A model with weights drawn on `device` itself, so that they never pass through main memory.

    With `place`, each parameter is moved to its device as soon as it is drawn. Placement does not change the numbers.
    """
    # The CPU tensors that are replaced one by one are never written, so they take no physical memory.
    with torch.device(device if place is None else "cpu"), no_init_weights():
        kind = AutoModelForCausalLM if family_of(config) is None else AutoModelForImageTextToText
        model = kind.from_config(config, dtype=dtype)
    model.tie_weights()
    draw_weights(model, torch.Generator(device).manual_seed(SEED), layer_gain, place)
    return model.eval()


def layer_placement(ranges: Sequence[tuple[int, int]], devices: Sequence[str]) -> Placement:
    """Puts each layer's weights on its stage's device, the head's on the last, and all others on the first."""

    def place(name: str) -> torch.device:
        found = None if "vision" in name or "visual" in name else _LAYER.search(name)
        if found is None:
            is_last = name.startswith("lm_head")
            return torch.device(devices[-1 if is_last else 0])
        layer = int(found[1])
        index = next(index for index, (first, end) in enumerate(ranges) if first <= layer < end)
        return torch.device(devices[index])

    return place


def preset_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the preset with this configuration."""
    if family_of(config) is None:
        return tiny_tokenizer()
    tokenizer = tiny_tokenizer(VISION_TOKENS[config.model_type])
    tokenizer.chat_template = vision_template(config.model_type)
    return tokenizer


def preset_processor(model: str, config: Any) -> Any:
    """The library's image processor for `random:NAME`, whose configuration is `config`; None for a text model."""
    settings = PROCESSORS.get(headless(model.removeprefix(PREFIX)))
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
