"""Tiny random models, and the library's own cache as the oracle that the engine is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from parkd_engine import EngineConfig, Session, open_session
from parkd_engine.draft.stream_head import head_class
from parkd_engine.families.layer_state import draft_layers
from parkd_engine.families.multimodal import language_config
from parkd_engine.families.presets.heads import own_parts
from parkd_engine.vision.tower import PromptImage
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionAndFullAttentionLayer

from tests.unit.engine.kit.vision_models import picture_logits, processor_of

VOCAB = 97
LAYERS = 4
CONTEXT = 1536
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
    }
    return FAMILIES[family][0](**{**shape, **changes})


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return FAMILIES[family][1](tiny_config(family, **changes)).eval()


def tiny_session(
    stages: int,
    model: Any | None = None,
    *,
    batch_tokens: int = 64,
    context: int = CONTEXT,
    kv_format: str | None = None,
) -> Session:
    config = EngineConfig(
        devices=("cpu",) * stages,
        context_tokens=context,
        batch_tokens=batch_tokens,
        kv_format=kv_format,
        draft_tokens=2,
    )
    model = tiny_model() if model is None else model
    return open_session(model, config, processor_of(model), draft_model=head_of(model))


def head_of(model: Any) -> Any:
    """A draft head whose guesses depend on the whole prompt, if the model's configuration names one."""
    if not draft_layers(language_config(model.config)):
        return None
    torch.manual_seed(5)
    head = head_class(model.config)(model, 1).eval()
    with torch.no_grad():
        for parameter in (each for part in own_parts(head) for each in part.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
    return head


def step_with_guesses(session: Session, token_id: int) -> list[torch.Tensor]:
    """The scores of a draft head's guesses, if there is one, and those behind the token."""
    scores: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> int:
        scores.append(logits)
        return int(logits.argmax())

    session.guess(token_id, 2, choose)
    return [*scores, session.step(token_id)]


def token_ids(count: int, seed: int = 1) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


class EightBitLayer(DynamicLayer):
    """The library's cache of floats, each token's keys and values rounded to what 8 bits a number and head can say."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(eight_bit(key_states), eight_bit(value_states), *args, **kwargs)


class EightBitIndexedLayer(EightBitLayer, DynamicIndexedLayer):
    """The same beside the indexer's keys, which stay as they are computed."""


class EightBitHybridLayer(EightBitLayer, LinearAttentionAndFullAttentionLayer):
    """The same beside convolution and recurrent states, which stay as they are computed."""


EIGHT_BIT_LAYERS = {
    DynamicLayer: EightBitLayer,
    DynamicIndexedLayer: EightBitIndexedLayer,
    LinearAttentionAndFullAttentionLayer: EightBitHybridLayer,
}


def eight_bit(states: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, dim]`, in plain words: no part of the engine."""
    scale = (states.abs().max(dim=-1, keepdim=True).values / 127).to(torch.float16).to(torch.float32)
    return torch.clamp(torch.round(states / scale), -127, 127) * scale


def oracle_logits(
    model: Any,
    ids: npt.NDArray[np.int64],
    batch_tokens: int,
    decoded: int = 1,
    *,
    kv_format: str | None = None,
    images: Sequence[PromptImage] = (),
) -> list[torch.Tensor]:
    """Logits after each of the last `decoded` tokens: the rest read in chunks, those one at a time, library cache.

    The model must already use the engine's attention, as it does once a session was opened on it.
    """
    assert language_config(model.config)._attn_implementation == "parkd"
    cache: Any = DynamicCache(config=model.config)
    if kv_format == "int8":
        # Windows and recurrent states stay as they are computed.
        kinds = [EIGHT_BIT_LAYERS.get(type(layer)) for layer in cache.layers]
        cache = Cache(layers=[kind() if kind else layer for kind, layer in zip(kinds, cache.layers, strict=True)])
    if images:
        return picture_logits(model, ids, images, batch_tokens, decoded, cache)
    logits = []
    with torch.inference_mode():
        prompt = len(ids) - decoded
        for start in range(0, prompt, batch_tokens):
            chunk = torch.from_numpy(ids[start : min(start + batch_tokens, prompt)])
            model(chunk[None], cache=cache, use_cache=True, logits_to_keep=1)
        for token in ids[prompt:]:
            output = model(torch.tensor([[int(token)]]), cache=cache, use_cache=True)
            logits.append(output.logits[0, -1])
    return logits


def read_and_decode(
    session: Session, ids: npt.NDArray[np.int64], decoded: int = 1, images: Sequence[PromptImage] = ()
) -> list[torch.Tensor]:
    """The same through the engine, from the session's position on; `ids` are the whole timeline."""
    prompt = len(ids) - decoded
    session.extend(ids[session.position : prompt], images=images)
    return [session.step(int(token)) for token in ids[prompt:]]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Bit for bit."""
    assert len(left) == len(right)
    for index, (mine, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(mine, other), f"logits {index} differ by {(mine - other).abs().max()}"


@contextmanager
def threads_for(kv_format: str | None) -> Iterator[None]:
    """Over 8-bit rows attention takes one KV head at a time, the oracle all at once. With several threads the kernel
    divides the two otherwise and sums round otherwise, so there the bits are compared on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if kv_format == "int8" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
