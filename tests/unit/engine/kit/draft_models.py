"""Tiny random models with a draft head, and what their greedy answers are without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from parkd_engine import EngineConfig, Session, open_session
from parkd_engine.decoding import Decoder
from parkd_engine.draft.stream_head import head_class
from parkd_engine.families.presets.heads import hand_on, own_parts
from parkd_engine.families.presets.weights import LAYER_ENDINGS
from parkd_engine.forward.stages import MIXER
from parkd_engine.loading.draft_loading import declare_head
from parkd_engine.words.sampling import TensorSampler

from parkd.types import SamplingParams
from tests.unit.engine.kit.core_models import VOCAB, tiny_model, token_ids
from tests.unit.engine.kit.hybrid_models import hybrid_model
from tests.unit.engine.kit.vision_models import processor_of

RECURRENT = ("qwen3.5", "qwen4-exp")
"""Their hidden states are in fixed state; those of the last go by several streams, and its head has an index."""
FAMILIES = ("qwen3", *RECURRENT, "deepseek-v3", "glm4-lite")
"""Those whose hidden states are in rows, one of keys and values and two of latents; and the others."""
EXPERTS = ("qwen3-next", "qwen4-exp", "deepseek-v3", "glm4-lite")
"""They take the tokens of a step together, those of wrong guesses among them."""
PROMPT = 45


def head_for(model: Any, *, seed: int = 5) -> Any:
    """A head whose guesses depend on the whole prompt."""
    declare_head(model.config)
    torch.manual_seed(seed)
    head = head_class(model.config)(model, 1).eval()
    for part in own_parts(head):
        redraw(part)
    return head


def redraw(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)


@cache
def drafting(family: str, *, echo: bool = False) -> tuple[Any, Any]:
    """A model and its head. `echo`: made to agree often, since what both say follows mostly from the last token."""
    model = tiny_model(family) if family == "qwen3" else hybrid_model(family)
    if family == "qwen3":
        redraw(model)
    head = head_for(model)
    if echo:
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(0.0, 1.0)
            for part in (model, head):
                for name, parameter in part.named_parameters():
                    if name.endswith(LAYER_ENDINGS):
                        parameter.mul_(0.12)
        hand_on(head, model)
    return model, head


def drafting_session(
    family: str,
    stages: int = 2,
    *,
    draft_tokens: int = 3,
    echo: bool = False,
    kv_format: str | None = None,
    batch_tokens: int = 64,
) -> Session:
    model, head = drafting(family, echo=echo)
    config = EngineConfig(
        devices=("cpu",) * stages,
        context_tokens=256,
        batch_tokens=batch_tokens,
        kv_format=kv_format,
        draft_tokens=draft_tokens,
    )
    return open_session(model, config, processor_of(model), draft_model=head)


def decoder(session: Session, prompt: npt.NDArray[np.int64], **settings: Any) -> Decoder:
    mask, ends = settings.pop("mask", None), settings.pop("end_token_ids", frozenset())
    sampling = SamplingParams(**{"temperature": 0.0, **settings})
    return Decoder(session, TensorSampler(sampling, VOCAB, prompt), mask=mask, end_token_ids=ends)


def say(decoding: Decoder, last_token_id: int, count: int) -> list[int]:
    """`count` tokens; the session is then behind all but the last."""
    tokens = decoding.tokens(last_token_id)
    said = [next(tokens) for _ in range(count)]
    tokens.close()
    return said


def greedy(session: Session, prompt: npt.NDArray[np.int64], count: int) -> list[int]:
    """Without guessing."""
    token, said = int(prompt[-1]), []
    for _ in range(count):
        token = int(session.step(token).argmax())
        said.append(token)
    return said


def prompt_ids(seed: int = 1) -> npt.NDArray[np.int64]:
    return token_ids(PROMPT, seed)


def oracle_guess(model: Any, head: Any, ids: npt.NDArray[np.int64]) -> torch.Tensor:
    """The head's scores for what follows `ids`, `[vocab]`: everything read anew, by the library alone."""
    tokens = torch.from_numpy(np.asarray(ids))[None]
    mixed_by, streams = getattr(head, MIXER, None), []
    with torch.inference_mode(), librarys_attention(head):
        decoder = model.get_decoder()
        if mixed_by is not None:  # Of several streams the head reads what the model mixes at its end.
            hook = decoder.hyper_connection_mixer.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
        hidden = decoder(tokens, use_cache=False).last_hidden_state
        if mixed_by is not None:
            hook.remove()
            hidden = streams[0]
        places = torch.arange(1, tokens.shape[1])[None]
        embedded = model.get_input_embeddings()(tokens[:, 1:])
        output = head.forward_layer(0, hidden[:, :-1], places, None, inputs_embeds=embedded)[:, -1:]
        output = output if mixed_by is None else mixed_by(output)
        logits: torch.Tensor = model.get_output_embeddings()(output[:, -1])[0]
    return logits


@contextmanager
def librarys_attention(head: Any) -> Iterator[None]:
    """Inside, the head makes the library's masks, and so its index chooses by the library's code."""
    before = head.config._attn_implementation
    head.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        head.config._attn_implementation = before


def guessed(session: Session, token_id: int, count: int = 1) -> list[torch.Tensor]:
    """The scores behind each guess; the best is taken."""
    scores: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> int:
        scores.append(logits)
        return int(logits.argmax())

    session.guess(token_id, count, choose)
    return scores
