"""Several turns at once in the torch engine: whatever runs beside them, answers have the bits that they have alone.

Tokens and logprobs of each answer are compared with those that the same client gets of a server of its own. Clients
come and leave at random, talk on, have other lengths and samplings, and are paused, since they are more than the seats.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from parkd_engine.together import Together

from parkd.config import ModelConfig
from parkd.engine_adapter.torch_engine import loading
from parkd.engine_adapter.torch_engine.engine import TorchEngine
from parkd.lane import forecast, schedule, seating, turn_runner
from parkd.state import EngineConfig
from parkd.types import SamplingParams
from tests.integration.api.api_harness import Messages, Running, body_of, running
from tests.integration.pauses.pause_kit import post, steady

pytestmark = pytest.mark.anyio

TURNS = 2
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.1, "top_p": 0.9, "seed": 3, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {"5": 4.0}},
)


def load(folder: Path, family: str, seats: int, **layout: Any) -> TorchEngine:
    settings = {"devices": ("cpu", "cpu"), "context_tokens": 1024, "batch_tokens": 64, "draft_tokens": 2, **layout}
    config = EngineConfig(seats=seats, **settings)
    return TorchEngine.load(ModelConfig(f"random:{family}", folder, layout=config), fresh_seed=lambda: 4)


class Client:
    """Talks; what it asks depends on its number and on what it was answered, never on when."""

    def __init__(self, number: int, seed: int, *, goes_on: bool = True) -> None:
        """`goes_on`: each turn follows the one before. Where state is exact at some positions only, what was live is
        continued from another than what was parked, so that other tokens are read at once, which changes bits."""
        self.number = number
        self.goes_on = goes_on
        self._rng = random.Random(f"{seed} {number}")
        self._talk: Messages = [
            {"role": "user", "content": f"Client {number} asks. " * self._rng.randint(1, 25)},
        ]
        self.got: list[Any] = []

    async def talk(self, server: Running, moods: random.Random | None) -> None:
        """`moods` decide when it asks, and when it leaves; None: always at once, and never."""
        for turn in range(TURNS):
            body = body_of(self._talk, self._rng.choice([3, 17, 60]), logprobs=True, top_logprobs=2)
            body |= {**self._rng.choice(SETTINGS), "cache_salt": f"{self.number} {self.goes_on or turn}"}
            if moods is not None:
                await anyio.sleep(moods.choice([0.0, 0.01, 0.1]))
                if moods.random() < 0.25:  # something else, which it does not wait for
                    with anyio.move_on_after(moods.choice([0.01, 0.05, 0.2])):
                        gone = {"role": "user", "content": f"Left alone, {turn}. " * moods.randint(1, 30)}
                        await post(server, body_of([gone], 300, cache_salt="nobody"))
            document = steady(await post(server, body))
            self.got.append(document)
            said = document["choices"][0]["message"]["content"]
            more = "And then? " * self._rng.randint(1, 4)
            before = [*self._talk, {"role": "assistant", "content": said}] if self.goes_on else []
            self._talk = [*before, {"role": "user", "content": more}]


@pytest.fixture
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_SLICE_S", 0.03)
    monkeypatch.setattr(forecast, "LEAST_SWITCH_S", 0.0005)


def as_if_recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the engine take steps of several seats from `Together`, as it does on cards. Notes how many."""
    widths: list[int] = []
    step = Together.step

    def noted(self: Together, seats: Any, token_ids: Any) -> Any:
        widths.append(len(seats))
        return step(self, seats, token_ids)

    monkeypatch.setattr(Together, "record", lambda _self: True)
    monkeypatch.setattr(Together, "step", noted)
    return widths


KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("tiny-llama", {}),
    "dense, taken together": ("tiny-llama", {}),
    "int8 rows": ("tiny-qwen3", {"kv_format": "int8"}),
    "one stage": ("tiny-qwen3", {"devices": ("cpu",)}),
    "windows": ("tiny-gemma3", {}),
    "linear layers, guesses": ("tiny-qwen3.5-mtp", {}),
}


@pytest.mark.usefixtures("_short_slices")
@pytest.mark.parametrize(("kind", "seed"), [(kind, 1 + number % 2) for number, kind in enumerate(KINDS)])
async def test_clients_at_random_get_the_bits_that_they_get_alone(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, layout = KINDS[kind]
    seats = 2 + seed % 2
    goes_on = kind not in ("windows", "linear layers, guesses")
    clients = [Client(number, seed, goes_on=goes_on) for number in range(seats + 2)]
    with monkeypatch.context() as patch:
        widths = as_if_recorded(patch) if "together" in kind else []
        engine = load(tmp_path, family, seats, **layout)
        async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
            async with anyio.create_task_group() as tasks:
                for client in clients:
                    tasks.start_soon(client.talk, server, random.Random(f"{client.number} {seed} moods"))
            await server.settled()
            page = (await server.client.get("/metrics")).text
        engine.close()
    assert "parkd_pauses_total 0.0" not in page
    assert max(widths, default=0) == (seats if widths else 0)
    alone = load(tmp_path, family, 1, **layout)
    async with running(alone, answer_bytes=0) as server:  # type: ignore[arg-type]
        for client in clients:
            again = Client(client.number, seed, goes_on=goes_on)
            await again.talk(server, None)
            assert client.got == again.got, client.number
    alone.close()


@pytest.mark.usefixtures("_short_slices")
async def test_turns_whose_rows_lie_close_together_get_the_bits_that_they_get_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All seats have one context of rows together: ranges slide apart while answers are under way, idle ones make way,
    who does not fit beside the others waits, and an answer that outgrows its rows waits for more."""
    for module in (seating, turn_runner):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(loading, "choose_seats", lambda _stages, context, asked, **_: (asked, context))
    clients = [Client(number, 5) for number in range(5)]
    engine = load(tmp_path, "tiny-llama", 3)
    assert engine.info.row_tokens == 1024
    async with running(engine, answer_bytes=0) as server, anyio.create_task_group() as tasks:  # type: ignore[arg-type]
        for client in clients:
            tasks.start_soon(client.talk, server, random.Random(client.number))
    engine.close()
    alone = load(tmp_path, "tiny-llama", 1)
    async with running(alone, answer_bytes=0) as server:  # type: ignore[arg-type]
        for client in clients:
            again = Client(client.number, 5)
            await again.talk(server, None)
            assert client.got == again.got, client.number
    alone.close()


def test_an_answer_that_went_on_elsewhere_is_not_taken_along_by_the_next_in_its_seat(tmp_path: Path) -> None:
    engine = load(tmp_path, "tiny-llama", 3)
    first, second, third = engine.seats
    ids, never = np.arange(10, 40), threading.Event()
    first.begin(ids, SamplingParams(temperature=0))
    first.extend(ids[:-1], cancel=never)
    steps = iter(first.generate())
    said = [*next(steps), *next(steps)]
    put_back = first.set_aside()
    second.extend(np.array([*ids, said[0]]), cancel=never)
    put_back(second)
    first.reset()
    first.begin(ids, SamplingParams())  # the next one, which is paused before it answers
    first.set_aside()(third)
    next(steps)
    assert [seat.position for seat in engine.seats] == [0, len(ids) + 2, 0]
    engine.close()


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gemma3", "tiny-qwen3.5-mtp"])
async def test_several_answers_to_one_prompt_have_the_bits_that_each_has_alone_and_it_is_read_once(
    family: str, tmp_path: Path
) -> None:
    ask: Messages = [{"role": "user", "content": "Each of several answers begins from the same prompt. " * 12}]
    body = body_of(ask, 9, logprobs=True, top_logprobs=2, temperature=0.9, seed=11)
    engine = load(tmp_path, family, 3)
    async with running(engine, answer_bytes=0) as server:  # type: ignore[arg-type]
        server.server.proxy.costs.note_read = lambda *_: None  # type: ignore[method-assign]
        document = await post(server, {**body, "n": 4})
        await server.settled()
        page = (await server.client.get("/metrics")).text
        prompt = len(server.prompt_tokens(ask))
    engine.close()
    read = float(page.split("\nparkd_prompt_tokens_read_total ")[1].split()[0])
    assert read == prompt + 3, "and the last token once for each of the others"
    alone = load(tmp_path, family, 1)
    async with running(alone, answer_bytes=0) as server:  # type: ignore[arg-type]
        for number, choice in enumerate(document["choices"]):
            [one] = (await post(server, {**body, "seed": 11 + number, "cache_prompt": False}))["choices"]
            assert choice == {**one, "index": number}
    alone.close()
