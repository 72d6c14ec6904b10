"""The words of a model, as its files have them: its tokenizer, its chat template, and which tokens end an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from parkd.errors import ModelError
from parkd.words.templates import ChatTemplate
from parkd_engine.words.chat import ChatTokenizer

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelWords:
    """What is needed of a model to write its prompts and read its answers, without its weights."""

    tokenizer: ChatTokenizer
    template: ChatTemplate
    end_token_ids: frozenset[int]
    vocab_size: int


def load_words(name: str, chat_template_file: Path | None = None) -> ModelWords:
    """The words in a directory, or of a model on the hub, of which only small files are downloaded. Raises
    ModelError."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not HUB_ID.fullmatch(name):
            raise ModelError(f"{name} is neither a directory nor a hub id such as owner/name.")
        folder = downloaded(name, SMALL_FILES)
    tokenizer, template = load_tokenizer(folder), template_source(chat_template_file)
    return ModelWords(
        ChatTokenizer(tokenizer, declares=template is None),
        ChatTemplate(tokenizer, template),
        end_token_ids(folder, None, tokenizer),
        len(tokenizer),
    )


def downloaded(hub_id: str, patterns: Sequence[str]) -> Path:
    """The folder of a hub model's files. Raises ModelError."""
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(f"{hub_id} is not a local path, and cannot be downloaded from the hub: {error}") from error


def load_tokenizer(folder: Path) -> Any:
    """The library's tokenizer. Raises ModelError."""
    # The library's class for a model kind may tokenize differently from `tokenizer.json`; the file decides.
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return kind.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"The tokenizer in {folder} cannot be loaded: {error}") from error


def end_token_ids(folder: Path, settings: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer. `settings` is the model's configuration; None: it is not looked at."""
    named: list[int | Sequence[int] | None] = [getattr(settings, "eos_token_id", None), tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id)
    ids: set[int] = set()
    for entry in named:
        if entry is not None:
            ids |= {entry} if isinstance(entry, int) else set(entry)
    return frozenset(ids)


def template_source(path: Path | None) -> str | None:
    """The text of a template's file; None if there is none. Raises ModelError."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"The chat template {path} cannot be read: {error}.") from error
