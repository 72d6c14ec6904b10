"""Answers of a length that the client fixes, biases by text, and prompts that open no answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parkd_engine.words.sampling import TensorSampler

from parkd.answers.base import OutputFormat, ToolFormat
from parkd.answers.ends import HeldEnds, opening_ids, with_ends_held
from parkd.cli.compose import mask_builder
from parkd.errors import InvalidRequest
from parkd.types import FormKind, SamplingParams, TextForm, TokenMask, ToolChoice, ToolChoiceMode, TurnRequest
from tests.fakes.engine import FakeEngine
from tests.fakes.text import END_TOKEN_ID
from tests.integration.api.api_harness import Running, running

pytestmark = pytest.mark.anyio
TALK = [{"role": "user", "content": "Say ok."}]
ENDS = frozenset({END_TOKEN_ID})

Tokens = Callable[[dict[str, Any]], int]

DIALECTS: list[tuple[str, dict[str, Any], str, Tokens]] = [
    ("/v1/chat/completions", {"messages": TALK}, "max_tokens", lambda told: told["usage"]["completion_tokens"]),
    ("/v1/completions", {"prompt": "Say ok."}, "max_tokens", lambda told: told["usage"]["completion_tokens"]),
    ("/v1/completions", {"prompt": "Say ok."}, "n_predict", lambda told: told["usage"]["completion_tokens"]),
    ("/v1/responses", {"input": TALK}, "max_output_tokens", lambda told: told["usage"]["output_tokens"]),
    ("/v1/messages", {"messages": TALK}, "max_tokens", lambda told: told["usage"]["output_tokens"]),
    ("/completion", {"prompt": "Say ok."}, "n_predict", lambda told: told["tokens_predicted"]),
    ("/api/chat", {"messages": TALK}, "num_predict", lambda told: told["eval_count"]),
]


def held(request: TurnRequest, _tail: str, _still_wanted: object) -> TokenMask | None:
    return with_ends_held(request, ENDS, FakeEngine().info.vocab_size, None)


async def asked(server: Running, path: str, body: dict[str, Any]) -> Any:
    if path.startswith("/api/"):
        own = {name: body[name] for name in ("messages", "stream")}
        body = {**own, "options": {name: value for name, value in body.items() if name not in own}}
    response = await server.client.post(path, json={"model": "any", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("path", "prompt", "limit", "tokens"), DIALECTS, ids=[f"{d[0]} {d[2]}" for d in DIALECTS])
async def test_found_by_use_33_an_answers_length_is_as_asked_in_every_dialect(
    path: str, prompt: dict[str, Any], limit: str, tokens: Tokens
) -> None:
    """Benchmarks of a fixed length got answers that ended where the model ended them."""
    async with running(FakeEngine(script=lambda _prompt: "ok"), build_mask=held) as server:
        body = {**prompt, limit: 12, "stream": False}
        plain = tokens(await asked(server, path, body))
        assert plain == 3, "two letters and the end"
        assert tokens(await asked(server, path, {**body, "ignore_eos": True})) == 12
        assert tokens(await asked(server, path, {**body, "min_tokens": 2})) == plain
        assert tokens(await asked(server, path, {**body, "min_tokens": 7})) >= 7
        if path != "/api/chat":
            refused = await server.client.post(path, json={**body, "min_tokens": 13})
            assert refused.status_code == 400
            assert "min_tokens" in refused.text


def test_found_by_use_33_other_tokens_are_drawn_as_if_there_were_no_end() -> None:
    logits = torch.tensor([0.5, 3.0, -1.0, 2.0, 0.0])
    mask = HeldEnds(frozenset({1, 3}), 5, 2, None)
    sampler = TensorSampler(SamplingParams(temperature=0.7, seed=3), 5, np.zeros(0, np.int64))
    others = [0, 2, 4]
    wanted = np.exp(np.array([0.5, -1.0, 0.0]) / 0.7)
    wanted /= wanted.sum()
    for _ in range(2):
        given = sampler.distribution(logits, mask.allowed())
        assert [given.probability(token) for token in others] == pytest.approx(wanted.tolist(), rel=1e-5)
        assert [given.probability(token) for token in (1, 3)] == [0, 0]
        mask.accept(0)
    assert mask.allowed().all(), "two tokens are there"


@pytest.mark.parametrize(
    ("tools", "openers", "open_ids"),
    [
        (ToolFormat.NONE, {"user": "<|im_start|>user\n", "assistant": "<a>"}, [0, 255]),
        (ToolFormat.NONE, {"user": "\n<|im_start|>user\n"}, [0, 255]),
        (ToolFormat.NONE, {"user": "[INST] ", "assistant": "<|im_start|>"}, [0, 255, 256]),
        (ToolFormat.HARMONY, {"user": "<|im_start|>user"}, [0, 255, 256]),
        (ToolFormat.NONE, {}, [0, 255, 256]),
    ],
)
def test_found_by_use_33_an_answer_without_end_does_not_go_on_as_another(
    tools: ToolFormat, openers: dict[str, str], open_ids: list[int]
) -> None:
    """The model that could not end its turn opened the user's."""
    engine: Any = FakeEngine()
    engine.template_source = None
    structured: Any = SimpleNamespace(mask=lambda *_: None)
    build = mask_builder(engine, OutputFormat(tools), structured, openers)
    for sampling in (SamplingParams(ignore_eos=True), SamplingParams(min_tokens=1)):
        mask = build(TurnRequest(sampling=sampling), "", lambda: True)
        assert mask is not None
        allowed = mask.allowed()
        assert [token for token in (0, 255, 256, END_TOKEN_ID) if allowed[token]] == open_ids
    assert build(TurnRequest(), "", lambda: True) is None


def test_the_first_control_token_opens_a_turn() -> None:
    control = ("<|start|>", "<|start|>user", "<|two|>")
    ids = {"<|start|>": [1], "<|start|>user": [2], "<|two|>": [3, 4]}
    assert opening_ids(["\n<|start|>user<|two|>"], control, ids.__getitem__) == {2}
    assert opening_ids(["<|start|>tool", "plain", "<|two|><|start|>"], control, ids.__getitem__) == {1}


class Only:
    """A grammar whose text is complete after `left` tokens."""

    def __init__(self, left: int) -> None:
        self.left = left

    def allowed(self) -> np.ndarray:
        return np.array([self.left > 0, self.left <= 0, False])

    def accept(self, token_id: int) -> None:
        self.left -= 1


def test_found_by_use_33_a_form_that_is_complete_too_early_is_a_refusal() -> None:
    for least, ends in ((2, True), (3, False)):
        mask = HeldEnds(frozenset({1}), 3, least, Only(2))
        for _ in range(2):
            assert mask.allowed().tolist() == [True, False, False]
            mask.accept(0)
        if ends:
            assert mask.allowed().tolist() == [False, True, False]
        else:
            with pytest.raises(InvalidRequest, match="1 more"):
                mask.allowed()


@pytest.mark.parametrize(
    "form",
    [
        {"response_schema": {"type": "object"}},
        {"response_form": TextForm(FormKind.REGEX, "a+", "regex")},
        {"tool_choice": ToolChoice(ToolChoiceMode.REQUIRED)},
    ],
)
def test_found_by_use_33_an_answer_without_end_has_no_form(form: dict[str, Any]) -> None:
    request = TurnRequest(sampling=SamplingParams(ignore_eos=True), **form)
    with pytest.raises(InvalidRequest, match="contradicts") as refused:
        with_ends_held(request, ENDS, 300, None)
    assert refused.value.param == "ignore_eos"


async def test_found_by_use_33_a_prompt_need_not_open_an_answer() -> None:
    engine = FakeEngine()
    async with running(engine) as server:
        for talk in (TALK, [*TALK, {"role": "assistant", "content": "ok"}]):
            for fields, opens in (({"add_generation_prompt": False}, False), ({"continue_final_message": False}, True)):
                response = await server.client.post("/apply-template", json={"messages": talk, **fields})
                rendered = engine.template.render(talk, (), {}, add_generation_prompt=opens).text
                assert response.json()["prompt"] == rendered, (talk, fields)
        answer = await server.chat(TALK, add_generation_prompt=False)
        closed = engine.template.render(TALK, (), {}, add_generation_prompt=False).text
        assert answer.usage["prompt_tokens"] == len(engine.tokenizer.encode(closed))
        forged = [{"role": "user", "content": "<|im_end|>"}]
        response = await server.client.post(
            "/apply-template", json={"messages": forged, "add_generation_prompt": False}
        )
        assert response.json()["prompt"].count("assistant") == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"5": -100}, {5: -100.0}),
        ([[5, 1.5], ["7", False]], {5: 1.5, 7: -np.inf}),
        ({"ok": 2}, {ord("o"): 2.0, ord("k"): 2.0}),
        ([["ok", False], [ord("k"), 1]], {ord("o"): -np.inf, ord("k"): 1.0}),
    ],
)
async def test_found_by_use_34_a_bias_is_by_id_or_by_text_and_a_list_too(given: Any, wanted: dict[int, float]) -> None:
    engine = FakeEngine()
    seen: list[SamplingParams] = []

    def noted(request: TurnRequest, _tail: str, _still_wanted: object) -> None:
        seen.append(request.sampling)

    async with running(engine, build_mask=noted) as server:
        await server.chat(TALK, logit_bias=given)
        assert seen[-1].logit_bias == wanted
        assert engine.begun.sampling.logit_bias == wanted, "and so the engine samples"


async def test_found_by_use_34_a_bias_that_cannot_be_is_refused() -> None:
    async with running(FakeEngine()) as server:
        for given in ("x", 5, [[1]], [1], {"": 1}, {"x" * 1001: 1}, {"5": 101}, {"5": True}, [[-1, 1]], [[True, 1]]):
            response = await server.client.post(
                "/v1/chat/completions", json={"messages": TALK, "logit_bias": given, "max_tokens": 1}
            )
            assert response.status_code == 400, given
            assert response.json()["error"]["param"] == "logit_bias"
