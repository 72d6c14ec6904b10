"""The draft head: what it guesses, that guessing changes no answer, and that guesses are taken back to the bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from parkd_engine import EngineConfig, Session, capture, host_transfer, open_session, restore
from parkd_engine.arenas.step_history import StepHistory
from parkd_engine.families.layer_state import WINDOW_FIELDS
from parkd_engine.forward import attention as engine_attention
from parkd_engine.words.sampling import TensorSampler
from torch.nn import functional

from parkd.errors import LogitsNotFinite, StageFailed
from parkd.types import SamplingParams
from tests.unit.engine.kit.core_models import VOCAB, assert_same, token_ids
from tests.unit.engine.kit.draft_models import (
    EXPERTS,
    FAMILIES,
    PROMPT,
    RECURRENT,
    decoder,
    drafting,
    drafting_session,
    greedy,
    guessed,
    oracle_guess,
    prompt_ids,
    say,
)
from tests.unit.engine.kit.hybrid_models import hybrid_model

EVERY_STAGES = pytest.mark.parametrize("stages", [1, 2, 3])
EVERY_FORMAT = pytest.mark.parametrize("kv_format", [None, "int8"], ids=["full", "int8"])
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
WITH_EXPERTS = pytest.mark.parametrize("family", [*FAMILIES, "qwen3-next"])
SINGLE_STEPS = 1e-4
"""Largest difference of logits in float32 between tokens run at once and one at a time."""


def state_of(session: Session) -> dict[tuple[int, str], torch.Tensor]:
    """Every field of the state at the position, by layer and name."""
    position = session.position
    session.fixed_state.live(position)
    fields: dict[tuple[int, str], torch.Tensor] = {}
    for arena in session.arenas:
        for field in arena.layout.row_fields:
            fields[field.layer, field.name] = arena.field_view(field)[:position].clone()
        for field in arena.layout.fixed_fields:
            fields[field.layer, field.name] = arena.fixed_view(field).clone()
    return fields


def assert_same_state(left: Session, right: Session) -> None:
    mine, other = state_of(left), state_of(right)
    assert mine.keys() == other.keys()
    assert [key for key in mine if not torch.equal(mine[key], other[key])] == []


@pytest.mark.parametrize("stages", [1, 3])
@WITH_EXPERTS
def test_guesses_are_those_of_the_librarys_head(family: str, stages: int) -> None:
    """Read in chunks, at the first token that has one, after decoding, and after a cut."""
    model, head = drafting(family)
    session = drafting_session(family, stages)
    ids = prompt_ids()
    assert guessed(session, int(ids[0])) == []
    session.extend(ids[:1])
    for position in range(1, PROMPT - 1):
        if position in (1, 2, 17, PROMPT - 2):
            [mine] = guessed(session, int(ids[position]))
            torch.testing.assert_close(mine, oracle_guess(model, head, ids[: position + 1]), atol=1e-4, rtol=0)
        if position % 3:
            session.step(int(ids[position]))
        else:
            session.extend(ids[position : position + 1])
    session.reset()
    session.extend(ids[:-1], checkpoint_at=(20,))
    [mine] = guessed(session, int(ids[-1]))
    torch.testing.assert_close(mine, oracle_guess(model, head, ids), atol=1e-4, rtol=0)
    session.truncate(20)
    [mine] = guessed(session, int(ids[20]))
    torch.testing.assert_close(mine, oracle_guess(model, head, ids[:21]), atol=1e-4, rtol=0)


@EVERY_FAMILY
def test_guesses_far_ahead_do_not_depend_on_what_lay_there(family: str) -> None:
    """In fresh memory, and where the model has read other tokens meanwhile: positions of an index among them. Nor does
    what comes then depend on them, blocks of an index among it."""
    ids, others = prompt_ids(), token_ids(40, seed=8)
    session, plain = (drafting_session(family, draft_tokens=9) for _ in range(2))
    for arena in session.arenas:
        arena.rows.fill_(7)
    for each in (session, plain):
        each.extend(ids[:-1], checkpoint_at=(PROMPT - 1,))
    fresh = guessed(session, int(ids[-1]), 9)
    assert len(fresh) == 9
    for each in (session, plain):
        each.extend(others)
    assert_same(guessed(session, 5, 9), guessed(plain, 5, 9))
    session.truncate(PROMPT - 1)
    assert_same(guessed(session, int(ids[-1]), 9), fresh)


@EVERY_FORMAT
@EVERY_STAGES
@EVERY_FAMILY
def test_greedy_answers_are_those_without_guessing(family: str, stages: int, kv_format: str | None) -> None:
    """Of a head that is right at times."""
    ids, count = prompt_ids(), 20
    session = drafting_session(family, stages, echo=True, kv_format=kv_format)
    session.extend(ids[:-1])
    expected = greedy(session, ids, count)
    session.truncate(0)
    session.extend(ids[:-1])
    decoding = decoder(session, ids)
    assert say(decoding, int(ids[-1]), count) == expected
    assert session.position == PROMPT + count - 1
    assert 0 < decoding.counts.accepted < decoding.counts.drafted


def test_guessing_ends_where_the_context_does() -> None:
    ids, session = token_ids(250), drafting_session("qwen3", echo=True)
    session.extend(ids[:-1])
    expected = greedy(session, ids, 7)
    session.reset()
    session.extend(ids[:-1])
    assert list(decoder(session, ids).tokens(int(ids[-1]))) == expected
    assert session.position == session.context_tokens == 256


@EVERY_FAMILY
def test_a_head_that_is_always_right_answers_several_tokens_a_step(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, ids = drafting_session(family), prompt_ids()
    session.extend(ids[:-1])
    expected = greedy(session, ids, 16)
    session.reset()
    session.extend(ids[:-1])

    def truth(_token: int, position: int, count: int, choose: Callable[[torch.Tensor], int]) -> list[int]:
        known = expected[position - PROMPT + 1 :][:count]
        return [choose(functional.one_hot(torch.tensor(token), VOCAB).float()) for token in known]

    assert session.draft is not None
    monkeypatch.setattr(session.draft, "guess", truth)
    decoding = decoder(session, ids)
    assert say(decoding, int(ids[-1]), 16) == expected
    assert (decoding.counts.drafted, decoding.counts.accepted) == (12, 12)


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic that does not depend on how many tokens are run at once, as sums of a matrix product do, and functions
    of which a processor takes several numbers at a time, and the rest by another way."""
    product, attend = functional.linear, engine_attention._attend

    def row_for_row(compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def every(states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.stack([compute(row) for row in states.reshape(-1, states.shape[-1])]).view(states.shape)

        return every

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = rows.reshape(-1, 1, rows.shape[-1])
        return torch.cat([product(row, weight, bias) for row in flat]).reshape(*rows.shape[:-1], weight.shape[0])

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
        count, kept = query.shape[2], key.shape[2]
        scaling, window, spans, sinks = rest
        outputs = []
        for index in range(count):
            stop = kept - count + index + 1
            first = max(0, stop - window) if window is not None else 0
            seen = slice(first, stop)
            outputs.append(
                attend(query[:, :, index : index + 1], key[:, :, seen], value[:, :, seen], scaling, None, spans, sinks)
            )
        return torch.cat(outputs, dim=2)

    monkeypatch.setattr(functional, "linear", linear)
    monkeypatch.setattr(functional, "silu", row_for_row(functional.silu))
    for place in (torch, torch.Tensor):
        monkeypatch.setattr(place, "sigmoid", row_for_row(torch.sigmoid))
    monkeypatch.setattr(engine_attention, "_attend", attention)
    monkeypatch.setattr(engine_attention, "FEW", 0)  # Keys chosen by an index are gathered, query by query.


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3-next", "gemma3"])
@pytest.mark.usefixtures("row_by_row")
def test_what_was_guessed_wrongly_was_never_there(family: str, stages: int) -> None:
    """Rows, recurrent, convolution and window states and the head's own: in the bits of single steps."""
    if family == "gemma3":
        config = EngineConfig(devices=("cpu",) * stages, context_tokens=256, batch_tokens=16, window_slack_tokens=0)
        guessing, plain = (open_session(hybrid_model("gemma3"), config) for _ in range(2))
    else:
        guessing, plain = (drafting_session(family, stages) for _ in range(2))
    ids, sure = prompt_ids(), token_ids(12, seed=7)
    for session in (guessing, plain):
        session.config._experts_implementation = "eager"
        session.extend(ids)
    done = 0
    for kept in (1, 2, 4, 1, 3):
        wrong = [int(token) for token in (sure[done + kept :] + 1) % VOCAB]
        step = [*map(int, sure[done : done + kept]), *wrong][:4]
        guessing.verify(step)
        guessing.truncate(PROMPT + done + kept)
        for token in sure[done : done + kept]:
            plain.step(int(token))
        done += kept
        assert_same_state(guessing, plain)
    assert_same([guessing.step(5)], [plain.step(5)])
    assert_same(guessed(guessing, 6, 2), guessed(plain, 6, 2))


@WITH_EXPERTS
def test_without_that_only_the_number_of_tokens_shows(family: str) -> None:
    """State behind a step does not depend on what was guessed wrongly in it, and differs from that of single steps by
    the order of sums alone."""
    ids = prompt_ids()
    left, right, plain = (drafting_session(family) for _ in range(3))
    for session in (left, right, plain):
        session.extend(ids)
    left.verify([3, 4, 5, 6])
    right.verify([3, 4, 50, 60])
    for session in (left, right):
        session.truncate(PROMPT + 2)
    plain.step(3)
    plain.step(4)
    if family not in EXPERTS:
        assert_same_state(left, right)
    mine, other = state_of(left), state_of(plain)
    for key in mine:
        torch.testing.assert_close(mine[key], other[key], atol=SINGLE_STEPS, rtol=0, msg=str(key))


@EVERY_FAMILY
def test_a_step_is_taken_back_only_until_more_is_read(family: str) -> None:
    session = drafting_session(family)
    session.extend(prompt_ids())
    exact_once = family in RECURRENT
    session.verify([1, 2, 3])
    assert session.rewind_floor == (PROMPT + 1 if exact_once else 0)
    session.truncate(PROMPT + 2)
    session.truncate(PROMPT + 1)
    assert session.rewind_floor == (PROMPT + 1 if exact_once else 0)
    session.step(4)
    assert session.rewind_floor == (PROMPT + 2 if exact_once else 0)
    if exact_once:
        with pytest.raises(ValueError, match=f"cannot truncate to {PROMPT + 1}"):
            session.truncate(PROMPT + 1)
        with pytest.raises(ValueError, match="5 tokens where states behind 3"):
            session.verify([1, 2, 3, 4, 5])
    assert session.position == PROMPT + 2


@EVERY_FAMILY
@pytest.mark.parametrize("taken", [1, 2, 3, 6])
def test_an_answer_left_in_mid_step_ends_where_it_was_left(family: str, taken: int) -> None:
    """As by a stop string, a limit or a client that leaves: and the next turn goes on from there."""
    session, ids = drafting_session(family, echo=True), prompt_ids(3)
    session.extend(ids[:-1])
    expected = greedy(session, ids, 12)
    session.reset()
    session.extend(ids[:-1])
    said = say(decoder(session, ids), int(ids[-1]), taken)
    assert session.position == PROMPT + taken - 1
    said += say(decoder(session, ids), said[-1], 12 - taken)
    assert said == expected


@pytest.mark.parametrize("stages", [1, 3])
@EVERY_FAMILY
def test_guesses_are_as_good_after_a_restore(family: str, stages: int) -> None:
    """The same tokens, drawn, and as many guesses right, as when the conversation had stayed."""
    session, ids = drafting_session(family, stages, echo=True), prompt_ids(3)
    results = []
    for leaves in (False, True):
        session.reset()
        session.extend(ids[:-1])
        first = say(decoder(session, ids, temperature=0.7, seed=5), int(ids[-1]), 12)
        scores = guessed(session, first[-1], 3)
        if leaves:
            plan = host_transfer(session, session.position, block_tokens=32)
            sums = capture(session, plan)
            session.reset()
            session.extend(token_ids(100, seed=9))
            say(decoder(session, ids), 3, 10)
            session.reset()
            restore(
                session, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed if len(sums.fixed) else None)
            )
            assert_same(guessed(session, first[-1], 3), scores)
        again = decoder(session, ids, temperature=0.7, seed=6)
        results.append((first, say(again, first[-1], 20), again.counts))
    assert results[0] == results[1]
    assert results[0][2].accepted > 0


@EVERY_FAMILY
def test_a_failure_in_mid_step_leaves_an_earlier_position(family: str) -> None:
    session, ids = drafting_session(family, echo=True), prompt_ids(3)
    session.extend(ids[:-1])
    expected = greedy(session, ids, 6)
    for layer in range(5):
        session.reset()
        session.extend(ids[:-1], checkpoint_at=(20, PROMPT - 1))
        tokens = decoder(session, ids).tokens(int(ids[-1]))
        broken = break_at(session, layer)
        with pytest.raises(StageFailed, match="injected"):
            next(tokens)
        broken.remove()
        assert session.position == PROMPT - 1
        assert say(decoder(session, ids), int(ids[-1]), 6) == expected


@pytest.mark.parametrize("layer", [0, 4])
def test_a_layer_that_keeps_no_state_of_a_step_is_noticed(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave another step's state, or none, where wrong guesses are taken back to."""
    session, ids = drafting_session("qwen3.5", echo=True), prompt_ids(3)
    session.extend(ids[:-1], checkpoint_at=(20, PROMPT - 1))
    expected = greedy(session, ids, 6)
    session.truncate(PROMPT - 1)
    kept = StepHistory.note
    with monkeypatch.context() as patched:
        patched.setattr(StepHistory, "note", lambda self, of, index: None if of == layer else kept(self, of, index))
        with pytest.raises(
            StageFailed, match=rf"layers \[{layer}\] did not keep their state after each of the step's 4"
        ):
            next(decoder(session, ids).tokens(int(ids[-1])))
    assert session.position == PROMPT - 1
    assert say(decoder(session, ids), int(ids[-1]), 6) == expected


def break_at(session: Session, layer: int) -> Any:
    def hook(*_: Any) -> None:
        raise RuntimeError("injected")

    if layer == 4:
        assert session.draft is not None
        return session.draft.model.layers[0].register_forward_hook(hook)
    stage = next(stage for stage in session.stages if stage.first_layer <= layer < stage.end_layer)
    inner: Any = stage.inner
    return inner.layers[layer].register_forward_hook(hook)


def test_a_restore_between_the_guesses_of_the_last_step_leaves_none_to_take_back() -> None:
    session, ids = drafting_session("qwen3.5"), prompt_ids(3)
    session.extend(ids[:-2])
    start = session.position
    for token in ids[-2:]:
        session.step(int(token))
    plan = host_transfer(session, start + 2, block_tokens=32)
    sums = capture(session, plan)
    session.reset()
    session.extend(ids[:-2])
    session.verify([1, 2, 3])
    restore(session, replace(plan, checksums=sums.rows, fixed_checksums=sums.fixed))
    assert session.rewind_floor == session.position == start + 2
    with pytest.raises(ValueError, match="cannot truncate"):
        session.truncate(start + 1)


def test_behind_scores_of_no_use_nothing_is_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ids = drafting_session("qwen3.5", echo=True), prompt_ids(3)
    session.extend(ids[:-1])
    expected = greedy(session, ids, 6)
    session.reset()
    session.extend(ids[:-1])
    usable = session.verify

    def verify(token_ids: list[int]) -> torch.Tensor:
        return usable(token_ids) * torch.nan

    monkeypatch.setattr(session, "verify", verify)
    with pytest.raises(LogitsNotFinite):
        say(decoder(session, ids), int(ids[-1]), 12)
    assert session.position == 0
    monkeypatch.undo()
    session.extend(ids[:-1])
    assert say(decoder(session, ids), int(ids[-1]), 6) == expected


def test_a_head_of_no_use_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ids = drafting_session("qwen3.5"), prompt_ids()
    session.extend(ids[:-1])
    expected = greedy(session, ids, 8)
    session.reset()
    session.extend(ids[:-1])
    monkeypatch.setattr(
        session.draft, "guess", lambda _token, _position, _count, choose: [choose(torch.full((VOCAB,), torch.nan))]
    )
    decoding = decoder(session, ids)
    assert say(decoding, int(ids[-1]), 8) == expected
    assert decoding.counts.drafted == 0


class EveryThird:
    """Only ids of one class are allowed, the class changing with every token."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.arange(VOCAB) % 3 == len(self.said) % 3

    def accept(self, token_id: int) -> None:
        assert self.allowed()[token_id]
        self.said.append(token_id)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 4}, {"presence_penalty": 1.5}])
def test_a_grammar_holds_for_every_token(settings: dict[str, Any]) -> None:
    session, ids = drafting_session("qwen3.5", echo=True), prompt_ids(3)
    masks, answers = [EveryThird(), EveryThird()], []
    for mask, draft_tokens in zip(masks, (3, 0), strict=True):
        session.reset()
        session.extend(ids[:-1])
        session.draft_tokens = draft_tokens
        answers.append(say(decoder(session, ids, mask=mask, **settings), int(ids[-1]), 20))
        assert mask.said[:20] == answers[-1]
        assert [token % 3 for token in answers[-1]] == [index % 3 for index in range(20)]
    if "temperature" not in settings:
        assert answers[0] == answers[1]


@EVERY_FAMILY
def test_a_grammar_that_fails_in_mid_step_leaves_what_was_heard(family: str) -> None:
    """Tokens that held before it failed were never said: their state would be of no known tokens."""
    session, ids = drafting_session(family, echo=True), prompt_ids(3)

    class Fails(EveryThird):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

        def accept(self, token_id: int) -> None:
            super().accept(token_id)
            if len(self.said) == self.at:
                raise RuntimeError("past its limits")

    for failing in (2, 3, 4, 6):
        session.reset()
        session.extend(ids[:-1])
        heard: list[int] = []
        mask = Fails(failing)
        tokens = decoder(session, ids, mask=mask).tokens(int(ids[-1]))
        with pytest.raises(RuntimeError, match="past its limits"):
            deque(map(heard.append, tokens), maxlen=0)
        assert PROMPT <= session.position <= PROMPT + len(heard)


def test_nothing_is_checked_behind_an_end_token() -> None:
    session, ids = drafting_session("qwen3", echo=True), prompt_ids(3)
    session.extend(ids[:-1])
    expected = greedy(session, ids, 20)
    for end in sorted(set(expected))[:3]:
        session.reset()
        session.extend(ids[:-1])
        tokens = decoder(session, ids, end_token_ids=frozenset({end})).tokens(int(ids[-1]))
        said: list[int] = []
        while end not in said:
            said.append(next(tokens))
        # Not even in the state: the step ended there by itself.
        assert session.position == PROMPT + len(said) - 1
        tokens.close()
        assert session.position == PROMPT + len(said) - 1
        assert said == expected[: len(said)]


def test_penalties_count_what_was_guessed_before() -> None:
    """Greedy with penalties, where a guess that ignored the one before it would repeat it."""
    session, ids = drafting_session("qwen3", echo=True), prompt_ids(3)
    settings = {"frequency_penalty": 2.0, "repetition_penalty": 1.3}
    answers = []
    for draft_tokens in (0, 3):
        session.reset()
        session.extend(ids[:-1])
        session.draft_tokens = draft_tokens
        decoding = decoder(session, ids, **settings)
        answers.append(say(decoding, int(ids[-1]), 20))
    assert answers[0] == answers[1]
    assert decoding.counts.accepted > 0


def test_the_head_is_counted_where_state_is() -> None:
    """A row as of a layer of its kind; the hidden state in rows, or in fixed state where there is some. Of several
    streams all are kept, and positions where the stage has none of its own."""
    keys, latents = {"key", "value"}, {"latent", "rotary_key"}
    for family, names, kept, row_bytes, fixed_bytes in (
        ("qwen3", keys, 2 * 2 * 16 * 4, 4 * 48, 0),
        ("qwen3.5", keys, 2 * 2 * 16 * 4, 0, 4 * 48),
        ("qwen4-exp", {*keys, "index_key"}, (2 * 2 + 1) * 16 * 4, 0, 3 * 4 * 48),
        ("deepseek-v3", latents, (24 + 8) * 4, 4 * 48, 0),
    ):
        model, _ = drafting(family)
        session = drafting_session(family)
        [last] = [arena.layout for arena in session.arenas if arena.layout.end_layer == 4]
        mine = [field for field in (*last.row_fields, *last.fixed_fields) if field.layer == 4]
        assert {field.name for field in mine} == {*names, "hidden"}
        assert sum(field.nbytes for field in last.row_fields if field.layer == 4) == kept + row_bytes
        assert sum(field.nbytes for field in last.fixed_fields if field.layer == 4) == fixed_bytes
        assert all(field.name not in WINDOW_FIELDS for field in mine)
        assert all(field.layer < 4 for field in session.arenas[0].layout.row_fields)
        assert model.config.num_mtp_layers == 1


def test_drawn_answers_have_the_distribution_of_single_steps() -> None:
    """The first two tokens of many answers against what the model says of each pair. Chi-square."""
    session, ids = drafting_session("qwen3", 1, echo=True, draft_tokens=1), prompt_ids(3)
    settings = {"temperature": 1.3, "top_k": 3}
    session.extend(ids[:-1])
    expected: dict[tuple[int, int], float] = {}
    sampler = TensorSampler(SamplingParams(**settings), VOCAB, ids)
    first = sampler.distribution(session.step(int(ids[-1])))
    assert first.ids is not None
    for token in map(int, first.ids):
        second = sampler.distribution(session.step(token))
        session.truncate(PROMPT)
        assert second.ids is not None
        pairs = {(token, int(other)): first.probability(token) * second.probability(int(other)) for other in second.ids}
        expected |= pairs
    counts: dict[tuple[int, int], int] = dict.fromkeys(expected, 0)
    answers, drafted, accepted = 300, 0, 0
    for seed in range(answers):
        session.truncate(PROMPT - 1)
        decoding = decoder(session, ids, seed=seed, **settings)
        one, other = say(decoding, int(ids[-1]), 2)
        counts[one, other] += 1
        drafted, accepted = drafted + decoding.counts.drafted, accepted + decoding.counts.accepted
    assert 0.1 * drafted < accepted < 0.95 * drafted
    # 99.9% quantile with 8 degrees of freedom: three tokens, each followed by one of three.
    assert sum((counts[pair] - answers * p) ** 2 / (answers * p) for pair, p in expected.items()) < 26.1
