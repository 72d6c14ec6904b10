"""parkd before a llama-server without a model, for the tests of the sidecar through its API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.api.api_harness import Messages, Running
from tests.integration.api.disk_harness import running_on
from tests.unit.llama_server.upstream_kit import FakeLlama, expected_answer, routed

LIMIT = 8
"""Tokens of an answer."""


@contextmanager
def mounted(folder: Path) -> Iterator[FakeLlama]:
    """A server with one slot."""
    (folder / "parkd").mkdir(mode=0o700)
    upstream = FakeLlama(folder, slots=1)
    with routed() as router:
        upstream.mount(router)
        router.route(host="127.0.0.1").pass_through()
        yield upstream


def before(upstream: FakeLlama) -> Any:
    return running_on(upstream.slot_dir / "parkd", upstream.engine(silence_s=5.0))


def opening(name: str, characters: int = 600, system: str = "You are helpful.") -> Messages:
    document = " ".join(f"{name}{number}" for number in range(characters))[:characters]
    return [{"role": "system", "content": system}, {"role": "user", "content": document}]


def turn_after(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def parked_in(server: Running) -> int:
    assert server.store is not None
    return server.store.stats().conversations


def alone(server: Running, messages: Messages) -> str:
    """What a server says that holds nothing else."""
    return expected_answer(server.prompt_tokens(messages), LIMIT)


async def check(server: Running, messages: Messages) -> Any:
    """The answer, once it is the right one and what it left is parked."""
    answer = await server.chat(messages, max_tokens=LIMIT)
    assert answer.text == alone(server, messages)
    await server.settled()
    return answer
