"""Converts a GGUF file into a model folder that loads in seconds. The library reads the file in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from parkd.errors import ModelError, UnsupportedModel
from parkd.model_files.cache import Progress
from parkd.model_files.gguf_metadata import GgufMetadata, named_damage, read_metadata
from parkd_engine.families.architectures import check_config
from parkd_engine.families.records import FAMILIES
from parkd_engine.loading.gguf_reading import quick_library_reader
from parkd_engine.loading.gguf_rope import ROPE_FACTORS, add_scaling
from parkd_engine.loading.gguf_tokenizer import save_tokenizer
from parkd_engine.loading.library_bars import no_library_bars

CONVERSION_VERSION = 2
"""Part of the cache's key. Raise it if conversion of the same file gives different bytes."""
CONVERTED_KINDS = tuple(family.gguf_name for family in FAMILIES if family.gguf_name is not None)
"""Architectures by llama.cpp's names."""
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")
"""Tokens that always end an answer, besides `eos_token_id`; many files name only one of two."""


def convert(path: Path, folder: Path, dtype: torch.dtype, progress: Progress | None = None) -> None:
    """Writes configuration, tokenizer and weights in `dtype` to `folder`.

    Raises UnsupportedModel or ModelError, where possible before any tensor is read.
    """
    tell = progress or (lambda *_: None)
    doing = f"Converting {path.name}"
    tell(doing, 0.0)
    file = read_metadata(path)
    if file.kind not in CONVERTED_KINDS:
        known = ", ".join(CONVERTED_KINDS)
        raise UnsupportedModel(f"{path} holds a model of the kind {file.kind!r}; GGUF files of {known} can be loaded.")
    config = config_of(file)
    tell(doing, 0.2)
    save_tokenizer(file, folder)
    tell(doing, 0.3)
    with no_library_bars():
        model = _model(file, config, dtype)
        tell(doing, 0.8)
        model.save_pretrained(str(folder))
    tell(doing, 1.0)


def end_token_ids(file: GgufMetadata) -> list[int]:
    """The ids that end an answer, in ascending order."""
    named = (file.entries.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    wanted = set(END_TOKENS)
    spelled = (number for number, token in enumerate(file.entries.get("tokenizer.ggml.tokens", [])) if token in wanted)
    return sorted({int(number) for number in named if number is not None} | set(spelled))


def config_of(file: GgufMetadata) -> Any:
    """The library's configuration, after checking that the engine runs it and that it uses every tensor of the file."""
    with named_damage(file.path), quick_library_reader():
        config = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    # The library leaves qwen3's head size at its default. This is llama.cpp's rule.
    config.head_dim = int(file.of_kind("attention.key_length", config.hidden_size // config.num_attention_heads))
    add_scaling(file, config)
    check_config(config)
    with named_damage(file.path), quick_library_reader(), torch.device("meta"):
        places = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), TensorProcessor())
    # The library silently drops tensors that it has no use for.
    strangers = sorted(set(file.tensors) - set(places) - {ROPE_FACTORS})
    if strangers:
        raise ModelError(
            f"{file.path} has tensors of unknown purpose ({', '.join(strangers[:3])}); load its safetensors instead."
        )
    return config


def _model(file: GgufMetadata, config: Any, dtype: torch.dtype) -> Any:
    """The model with its weights, to be saved as a model that was never quantised."""
    with named_damage(file.path), quick_library_reader():
        model, found = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, config=config, dtype=dtype, output_loading_info=True
        )
    if found["missing_keys"]:
        # The library would use random numbers for them.
        raise ModelError(f"{file.path} lacks weights: {', '.join(sorted(found['missing_keys'])[:3])}.")
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    ends = end_token_ids(file)
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    return model
