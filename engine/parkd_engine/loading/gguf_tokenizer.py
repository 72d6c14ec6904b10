"""Builds the library's tokenizer from the entries of a GGUF file.

The library builds SentencePiece tokenizers. Byte-level ones are built here, since the pre-tokenizer
(`tokenizer.ggml.pre`) decides the ids. The library treats unknown ones as GPT-2's, leaves out `smollm`'s digit
splitting, Llama 3's `ignore_merges` and Qwen's NFC, and skips special tokens that are not spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parkd.errors import ModelError
from parkd.model_files.gguf_metadata import GgufMetadata, named_damage

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def save_tokenizer(file: GgufMetadata, folder: Path) -> None:
    """Writes `tokenizer.json` and related files, with the chat template. Raises ModelError."""
    kind = str(file.entries.get("tokenizer.ggml.model", ""))
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise ModelError(f"{file.path} has a tokenizer of the kind {kind!r}; gpt2 and llama can be read.")
    tokenizer.chat_template = file.entries.get("tokenizer.chat_template")
    tokenizer.save_pretrained(str(folder))


def _sentencepiece(file: GgufMetadata) -> PreTrainedTokenizerFast:
    with named_damage(file.path):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and not file.entries.get(
        "tokenizer.ggml.add_space_prefix", True
    ):
        backend.pre_tokenizer.prepend_scheme = "never"
    return tokenizer


def _byte_level(file: GgufMetadata) -> PreTrainedTokenizerFast:
    tokens: list[str] = file.entries.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = file.entries.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in file.entries.get("tokenizer.ggml.merges", [])]
    way = str(file.entries.get("tokenizer.ggml.pre", "default"))
    if not tokens or len(kinds) != len(tokens):
        raise ModelError(f"{file.path} contains no usable vocabulary.")
    if way not in _CUTS:
        raise ModelError(f"{file.path} has an unknown pre-tokenizer ({way!r}); load the model's safetensors instead.")
    backend = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=way in _IGNORE_MERGES)
    )
    if way in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _CUTS[way]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **_named_tokens(file, tokens))


def _named_tokens(file: GgufMetadata, tokens: list[str]) -> dict[str, Any]:
    named = {}
    for name in ("bos", "eos", "unknown", "padding"):
        number = file.entries.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and 0 <= number < len(tokens):
            named[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = tokens[number]
    return named


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS + digits + _REST), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _three_digits() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}{1,3}")


def _one_digit() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}")


def _plain() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _plain_with_digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _plain()])


_CUTS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = MappingProxyType(
    {
        "default": _plain,
        "gpt-2": _plain,
        "smollm": _plain_with_digits_apart,
        "llama-bpe": _three_digits,
        "llama-v3": _three_digits,
        "llama3": _three_digits,
        "qwen2": _one_digit,
        "deepseek-r1-qwen": _one_digit,
    }
)
_IGNORE_MERGES = frozenset({"llama-bpe", "llama-v3", "llama3"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
