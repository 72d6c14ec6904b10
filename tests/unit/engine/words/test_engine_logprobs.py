"""Logprobs are the log-softmax of the model's logits, whatever shapes the choice, and the same after a restore."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine import capture, host_transfer, restore
from parkd_engine.decoding import Decoder
from parkd_engine.words.sampling import TensorSampler

from parkd.types import SamplingParams
from parkd.words.logprobs import TokenLogprobs, logprobs_of
from tests.unit.engine.kit.core_models import VOCAB, tiny_model, tiny_session, token_ids
from tests.unit.engine.kit.draft_models import drafting_session, prompt_ids
from tests.unit.engine.kit.hybrid_models import hybrid_model

PROMPT = token_ids(70)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.3, seed=7, logit_bias={3: 5.0})


def scored(session: Any, settings: SamplingParams, *, top: int = 4, count: int = 8) -> list[TokenLogprobs]:
    """The answer behind all but the last token of the prompt."""
    decoder = Decoder(session, TensorSampler(settings, VOCAB, PROMPT), top_logprobs=top)
    tokens = decoder.tokens(int(PROMPT[-1]))
    said = [next(tokens) for _ in range(count)]
    tokens.close()
    assert [each.token_id for each in decoder.logprobs[:count]] == said
    return decoder.logprobs[:count]


@pytest.mark.parametrize("seed", range(4))
def test_logprobs_are_the_log_softmax(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 6, 500).astype(np.float32)
    logits[[4, 9, 77]] = logits.max() + 1
    logits[20] = -np.inf
    exact = logits.astype(np.float64) - np.log(np.sum(np.exp(logits.astype(np.float64))))
    found = logprobs_of(logits, 123, 5)
    assert found.logprob == pytest.approx(exact[123], abs=1e-5)
    ranked = sorted(range(500), key=lambda token: (-logits[token], token))[:5]
    assert [token for token, _ in found.top] == ranked
    assert ranked[:3] == [4, 9, 77]
    assert [logprob for _, logprob in found.top] == pytest.approx([exact[token] for token in ranked], abs=1e-5)
    assert logprobs_of(logits, 20, 0) == TokenLogprobs(20, -np.inf, ())
    assert len(logprobs_of(logits, 0, 1000).top) == 500


def test_what_shapes_the_choice_leaves_logprobs_as_the_model_gave_them() -> None:
    session = tiny_session(1, tiny_model())
    session.extend(PROMPT[:-1])
    first = scored(session, SAMPLED, count=1)[0]
    session.truncate(len(PROMPT) - 1)
    raw = session.step(int(PROMPT[-1])).double()
    exact = torch.log_softmax(raw, -1)
    assert first.logprob == pytest.approx(float(exact[first.token_id]), abs=1e-5)
    assert [token for token, _ in first.top] == torch.topk(raw, 4).indices.tolist()


@pytest.mark.parametrize("settings", [SamplingParams(temperature=0), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_logprobs_after_a_restore_are_those_of_a_conversation_that_stayed(
    family: str, settings: SamplingParams
) -> None:
    """Found by use 25: bit for bit, for rows and for fixed state."""
    model = tiny_model(family) if family == "qwen3" else hybrid_model(family)
    stays, leaves = (tiny_session(2, model, context=256) for _ in range(2))
    for session in (stays, leaves):
        session.extend(PROMPT[:-1])
    plan = host_transfer(leaves, leaves.position, block_tokens=32)
    sums = capture(leaves, plan)
    leaves.reset()
    leaves.extend(token_ids(50, seed=3))
    restore(leaves, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed if len(sums.fixed) else None))
    assert scored(leaves, settings) == scored(stays, settings)


def test_guessed_tokens_have_logprobs_too() -> None:
    prompt = prompt_ids()
    session = drafting_session("qwen3.5", echo=True)
    session.extend(prompt[:-1])
    decoder = Decoder(session, TensorSampler(SamplingParams(temperature=0), VOCAB, prompt), top_logprobs=3)
    tokens = decoder.tokens(int(prompt[-1]))
    said = [next(tokens) for _ in range(12)]
    tokens.close()
    assert decoder.counts.drafted > 0
    single = drafting_session("qwen3.5", draft_tokens=0, echo=True)
    single.extend(prompt[:-1])
    token = int(prompt[-1])
    for found, wanted in zip(decoder.logprobs, said, strict=False):
        exact = torch.log_softmax(single.step(token).double(), -1)
        token = wanted
        assert found.token_id == wanted
        assert found.logprob == pytest.approx(float(exact[wanted]), abs=1e-3)


def test_nothing_is_kept_if_nobody_asks() -> None:
    session = tiny_session(1, tiny_model())
    session.extend(PROMPT[:-1])
    decoder = Decoder(session, TensorSampler(SamplingParams(temperature=0), VOCAB, PROMPT))
    tokens = decoder.tokens(int(PROMPT[-1]))
    next(tokens)
    assert decoder.logprobs == []
